// Stands in for torch/extension.h: the tensor class, the operators that a source names, and
// PYBIND11_MODULE for functions of tensors, numbers, texts, and vectors and optionals of them.
//
// torch's own header declares the whole of its C++ frontend and pybind11, which three parsers of
// nvcc read one after the other. This one takes a third to a tenth of the time. Whatever it lacks
// is a compile error, upon which the build goes on with torch's own header (see headers.py), so it
// need not be complete; what it accepts must mean the same as there.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
//@operators

namespace torch {
using namespace at;
using at::Tensor;
constexpr auto kUInt8 = at::kByte, kU8 = at::kByte, kInt8 = at::kChar, kI8 = at::kChar;
constexpr auto kInt16 = at::kShort, kI16 = at::kShort, kInt32 = at::kInt, kI32 = at::kInt;
constexpr auto kInt64 = at::kLong, kI64 = at::kLong, kFloat16 = at::kHalf, kF16 = at::kHalf;
constexpr auto kFloat32 = at::kFloat, kF32 = at::kFloat, kFloat64 = at::kDouble;
constexpr auto kF64 = at::kDouble;
}  // namespace torch

//@wrap

namespace light_binding {

// A Python argument of another type than the function takes.
struct WrongType {
  std::string expected;
};

template <class T, class = void>
struct Convert {
  static_assert(sizeof(T) == 0, "light_binding: no conversion for this type");
};

template <>
struct Convert<at::Tensor> {
  static std::string name() { return "torch.Tensor"; }
  static at::Tensor from(PyObject* object) {
    PyObject* address = PyObject_GetAttrString(object, "_cdata");
    if (address == nullptr) throw WrongType{name()};
    void* impl = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    if (impl == nullptr) throw WrongType{name()};
    return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
        static_cast<c10::TensorImpl*>(impl)));
  }
  static PyObject* to(const at::Tensor& tensor) {
    if (!tensor.defined()) Py_RETURN_NONE;
    return THPVariable_Wrap(tensor);
  }
};

template <>
struct Convert<bool> {
  static std::string name() { return "bool"; }
  static bool from(PyObject* object) {
    if (!PyBool_Check(object)) throw WrongType{name()};
    return object == Py_True;
  }
  static PyObject* to(bool value) { return PyBool_FromLong(value); }
};

template <class T>
struct Convert<T, std::enable_if_t<std::is_integral_v<T> && sizeof(T) >= 4>> {
  static std::string name() { return "int"; }
  static T from(PyObject* object) {
    PyObject* index = PyFloat_Check(object) ? nullptr : PyNumber_Index(object);
    if (index == nullptr) throw WrongType{name()};
    bool fits;
    T value;
    if constexpr (std::is_unsigned_v<T>) {
      const unsigned long long whole = PyLong_AsUnsignedLongLong(index);
      value = static_cast<T>(whole);
      fits = static_cast<unsigned long long>(value) == whole;
    } else {
      const long long whole = PyLong_AsLongLong(index);
      value = static_cast<T>(whole);
      fits = static_cast<long long>(value) == whole;
    }
    Py_DECREF(index);
    if (!fits || PyErr_Occurred()) throw WrongType{name()};
    return value;
  }
  static PyObject* to(T value) {
    if constexpr (std::is_unsigned_v<T>) return PyLong_FromUnsignedLongLong(value);
    return PyLong_FromLongLong(static_cast<long long>(value));
  }
};

template <class T>
struct Convert<T, std::enable_if_t<std::is_same_v<T, double> || std::is_same_v<T, float>>> {
  static std::string name() { return "float"; }
  static T from(PyObject* object) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) throw WrongType{name()};
    return static_cast<T>(value);
  }
  static PyObject* to(T value) { return PyFloat_FromDouble(value); }
};

template <>
struct Convert<std::string> {
  static std::string name() { return "str"; }
  static std::string from(PyObject* object) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
    if (text == nullptr) throw WrongType{name()};
    return std::string(text, static_cast<size_t>(size));
  }
  static PyObject* to(const std::string& text) {
    return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  }
};

template <class T>
struct Convert<std::optional<T>> {
  static std::string name() { return "Optional[" + Convert<T>::name() + "]"; }
  static std::optional<T> from(PyObject* object) {
    if (object == Py_None) return std::nullopt;
    return Convert<T>::from(object);
  }
  static PyObject* to(const std::optional<T>& value) {
    if (!value) Py_RETURN_NONE;
    return Convert<T>::to(*value);
  }
};

template <class T>
struct Convert<std::vector<T>> {
  static std::string name() { return "List[" + Convert<T>::name() + "]"; }
  static std::vector<T> from(PyObject* object) {
    const bool text = PyUnicode_Check(object) || PyBytes_Check(object);
    PyObject* items = text || !PySequence_Check(object) ? nullptr : PySequence_Fast(object, "");
    if (items == nullptr) throw WrongType{name()};
    std::vector<T> values;
    try {
      const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
      for (Py_ssize_t i = 0; i < count; ++i)
        values.push_back(Convert<T>::from(PySequence_Fast_GET_ITEM(items, i)));
    } catch (...) {
      Py_DECREF(items);
      throw;
    }
    Py_DECREF(items);
    return values;
  }
  static PyObject* to(const std::vector<T>& values) {
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(values.size()));
    for (size_t i = 0; list != nullptr && i < values.size(); ++i)
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), Convert<T>::to(values[i]));
    return list;
  }
};

template <class... T>
struct Convert<std::tuple<T...>> {
  static std::string name() {
    std::string text;
    ((text += (text.empty() ? "" : ", ") + Convert<T>::name()), ...);
    return "Tuple[" + text + "]";
  }
  static PyObject* to(const std::tuple<T...>& values) {
    return std::apply(
        [](const T&... value) {
          PyObject* tuple = PyTuple_New(sizeof...(T));
          Py_ssize_t i = 0;
          (PyTuple_SET_ITEM(tuple, i++, Convert<T>::to(value)), ...);
          return tuple;
        },
        values);
  }
};

template <class A, class B>
struct Convert<std::pair<A, B>> {
  static std::string name() { return Convert<std::tuple<A, B>>::name(); }
  static PyObject* to(const std::pair<A, B>& value) {
    return Convert<std::tuple<A, B>>::to(std::tuple<A, B>(value.first, value.second));
  }
};

template <class T>
std::string name_of() {
  if constexpr (std::is_void_v<T>)
    return "None";
  else
    return Convert<std::decay_t<T>>::name();
}

// One exported function. Objects live as long as the process.
struct Function {
  std::string name, documentation;
  std::vector<std::string> argument_names;
  std::vector<PyObject*> defaults;
  size_t count = 0;
  std::function<PyObject*(PyObject* const*)> call;
  PyMethodDef definition{};
};

template <class R, class... A>
struct Signature {
  static constexpr size_t count = sizeof...(A);

  static std::string text(const std::vector<std::string>& names) {
    std::string inside;
    size_t i = 0;
    (((inside += (i ? ", " : "") + names[i] + ": " + name_of<A>()), ++i), ...);
    return "(" + inside + ") -> " + name_of<R>();
  }

  template <class F>
  static std::function<PyObject*(PyObject* const*)> caller(F function) {
    return [function](PyObject* const* arguments) mutable {
      return call(function, arguments, std::index_sequence_for<A...>{});
    };
  }

  template <class F, size_t... I>
  static PyObject* call(F& function, PyObject* const* arguments, std::index_sequence<I...>) {
    static_cast<void>(arguments);
    std::tuple<std::decay_t<A>...> values{Convert<std::decay_t<A>>::from(arguments[I])...};
    if constexpr (std::is_void_v<R>) {
      function(static_cast<A&&>(std::get<I>(values))...);
      Py_RETURN_NONE;
    } else {
      return Convert<std::decay_t<R>>::to(function(static_cast<A&&>(std::get<I>(values))...));
    }
  }
};

template <class F>
struct SignatureOf : SignatureOf<decltype(&F::operator())> {};
template <class R, class... A>
struct SignatureOf<R (*)(A...)> : Signature<R, A...> {};
template <class C, class R, class... A>
struct SignatureOf<R (C::*)(A...) const> : Signature<R, A...> {};

inline bool spread(
    const Function& f, PyObject* const* given, Py_ssize_t count, PyObject* keywords,
    std::vector<PyObject*>& arguments) {
  if (static_cast<size_t>(count) > f.count) return false;
  std::copy(given, given + count, arguments.begin());
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t k = 0; k < named; ++k) {
    const std::string name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(keywords, k));
    const auto at = std::find(f.argument_names.begin(), f.argument_names.end(), name);
    if (at == f.argument_names.end()) return false;
    PyObject*& place = arguments[static_cast<size_t>(at - f.argument_names.begin())];
    if (place != nullptr) return false;
    place = given[count + k];
  }
  for (size_t i = 0; i < f.count; ++i)
    if (arguments[i] == nullptr && (arguments[i] = f.defaults[i]) == nullptr) return false;
  return true;
}

inline PyObject* dispatch(
    PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  auto& f = *static_cast<Function*>(PyCapsule_GetPointer(self, nullptr));
  try {
    std::vector<PyObject*> arguments(f.count, nullptr);
    if (!spread(f, given, count, keywords, arguments)) {
      PyErr_Format(
          PyExc_TypeError, "%s(): incompatible function arguments; it is %s", f.name.c_str(),
          f.documentation.c_str());
      return nullptr;
    }
    return f.call(arguments.data());
  } catch (const WrongType& wrong) {
    PyErr_Clear();
    PyErr_Format(
        PyExc_TypeError, "%s(): incompatible function arguments, expected a %s; it is %s",
        f.name.c_str(), wrong.expected.c_str(), f.documentation.c_str());
  } catch (const std::bad_alloc&) {
    PyErr_SetString(PyExc_MemoryError, "std::bad_alloc");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an exception that is no std::exception");
  }
  return nullptr;
}

}  // namespace light_binding

namespace pybind11 {

struct none {};

struct arg {
  std::string name;
  PyObject* value = nullptr;

  explicit arg(const char* text) : name(text) {}
  template <class T>
  arg operator=(const T& given) && {
    if constexpr (std::is_convertible_v<T, const char*>)
      value = PyUnicode_FromString(given);
    else if constexpr (std::is_same_v<T, none> || std::is_same_v<T, std::nullopt_t>)
      value = Py_NewRef(Py_None);
    else
      value = light_binding::Convert<T>::to(given);
    return *this;
  }
};

struct gil_scoped_release {
  PyThreadState* state = PyEval_SaveThread();
  gil_scoped_release() = default;
  gil_scoped_release(const gil_scoped_release&) = delete;
  ~gil_scoped_release() { PyEval_RestoreThread(state); }
};

class module_ {
 public:
  explicit module_(PyObject* object) : object_(object) {}

  template <class F, class... Extra>
  module_& def(const char* name, F&& function, const Extra&... extra) {
    using Plain = std::decay_t<F>;
    using Signature = light_binding::SignatureOf<Plain>;
    auto* f = new light_binding::Function;
    f->name = name;
    f->count = Signature::count;
    std::string words;
    (take(*f, words, extra), ...);
    for (size_t i = f->argument_names.size(); i < f->count; ++i) {
      f->argument_names.push_back("arg" + std::to_string(i));
      f->defaults.push_back(nullptr);
    }
    f->documentation = f->name + Signature::text(f->argument_names) + "\n\n" + words;
    f->call = Signature::caller(Plain(function));
    f->definition.ml_name = f->name.c_str();
    f->definition.ml_meth = reinterpret_cast<PyCFunction>(
        reinterpret_cast<void (*)()>(&light_binding::dispatch));
    f->definition.ml_flags = METH_FASTCALL | METH_KEYWORDS;
    f->definition.ml_doc = f->documentation.c_str();
    PyObject* self = PyCapsule_New(f, nullptr, nullptr);
    PyObject* callable = self ? PyCFunction_NewEx(&f->definition, self, nullptr) : nullptr;
    Py_XDECREF(self);
    if (callable == nullptr || PyModule_AddObject(object_, name, callable) != 0)
      throw std::runtime_error(std::string("cannot define ") + name);
    return *this;
  }

  std::string& doc() { return documentation_; }

 private:
  static void take(light_binding::Function&, std::string& words, const char* text) { words = text; }
  static void take(light_binding::Function& f, std::string&, const arg& argument) {
    f.argument_names.push_back(argument.name);
    f.defaults.push_back(argument.value);
  }

  PyObject* object_;
  std::string documentation_;
};
using module = module_;

}  // namespace pybind11

namespace py = pybind11;

#define LIGHT_BINDING_INIT(name) PyInit_##name
#define LIGHT_BINDING_TEXT_(name) #name
#define LIGHT_BINDING_TEXT(name) LIGHT_BINDING_TEXT_(name)
#define LIGHT_BINDING_MODULE(name, variable)                                                  \
  static void light_binding_fill(::pybind11::module_& variable);                              \
  extern "C" __attribute__((visibility("default"))) PyObject* LIGHT_BINDING_INIT(name)() {    \
    static PyModuleDef definition{PyModuleDef_HEAD_INIT, LIGHT_BINDING_TEXT(name), nullptr, -1}; \
    PyObject* object = PyModule_Create(&definition);                                          \
    if (object == nullptr) return nullptr;                                                    \
    try {                                                                                     \
      ::pybind11::module_ made(object);                                                       \
      light_binding_fill(made);                                                               \
    } catch (const std::exception& error) {                                                   \
      PyErr_SetString(PyExc_ImportError, error.what());                                       \
      Py_DECREF(object);                                                                      \
      return nullptr;                                                                         \
    }                                                                                         \
    return object;                                                                            \
  }                                                                                           \
  static void light_binding_fill(::pybind11::module_& variable)
#define PYBIND11_MODULE(name, variable, ...) LIGHT_BINDING_MODULE(name, variable)
