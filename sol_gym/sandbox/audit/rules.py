"""The rules: id, severity and the reason, which is what an author reads.

A rule with severity `veto` may name only what has no honest use in a kernel that computes its
outputs from its inputs. What honest kernels do now and then is `suspicious`, what they do often is
a `note`. Adding a rule is adding an entry here and a name to a table in `names.py`, or a small
check to a reader; docs/audit.md lists all rules and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...evaluation import Severity

_V, _S, _N = Severity.VETO, Severity.SUSPICIOUS, Severity.NOTE


@dataclass(frozen=True)
class Rule:
    """One rule of the audit."""

    id: str
    severity: Severity
    why: str
    """One or two sentences for the author: what it is, and why it is vetoed or reported."""
    languages: str = "Python, C++/CUDA"


_ALL = (
    # -- hidden or foreign code ---------------------------------------------------------------
    Rule("embedded-binary", _V, "Machine code is embedded in the source (an ELF, PE or CUDA binary, plain or encoded); a solution is source text that can be read and built."),
    Rule("hidden-code", _V, "Encoded, compressed or serialised data is turned into code and run; a kernel that computes its outputs has nothing to hide."),
    Rule("source-encoding", _V, "The file declares a text encoding other than UTF-8, so that what runs is not what is read.", "Python"),
    Rule("shadowed-module", _V, "A file has the name of a module that other code imports (torch, numpy, sitecustomize ...), so that it would run in that module's place.", "Python"),
    Rule("build-escape", _V, "The build would read files outside the solution (an absolute or parent path in #include or #embed, .incbin), or load a compiler plug-in.", "C++/CUDA"),
    Rule("encoded-literal", _S, "A long literal looks encoded or compressed; nobody can read what it holds."),
    Rule("dynamic-code", _S, "Code is made from a text at run time (exec, eval, compile); the audit reads constant texts, others it cannot.", "Python"),
    Rule("obfuscated-access", _S, "A name of a system module is computed at run time instead of being written.", "Python"),
    Rule("import-hook", _S, "The import system is changed.", "Python"),
    Rule("invisible-text", _S, "The text has characters that are invisible or reorder what is displayed."),
    Rule("long-table", _N, "A long table of numbers is written out."),
    # -- other code in the process ------------------------------------------------------------
    Rule("patch-runtime", _V, "A function or class of the runtime (time, builtins, torch, triton.testing ...) is replaced. Everybody in the process would use the replacement; a kernel needs to replace nothing but its own names.", "Python"),
    Rule("trace-hook", _V, "A tracing, profiling or audit hook is set, which watches the caller's code run.", "Python"),
    Rule("global-mode", _V, "A Torch function or dispatch mode of the solution's own is entered for good, so that every torch call of the process goes through it.", "Python"),
    Rule("heap-walk", _V, "Live objects of the process are enumerated through the garbage collector: a search for objects that were not passed in.", "Python"),
    Rule("frame-walk", _V, "Variables of calling functions are read through stack frames: a search for values that were not passed in.", "Python"),
    Rule("memory-edit", _V, "Objects of the interpreter are read or overwritten at their address (id() used as a pointer).", "Python"),
    Rule("interpose-runtime", _V, "A function of the CUDA runtime, the driver or the C library is defined again, so that callers in the process get this one.", "C++/CUDA"),
    Rule("code-patch", _V, "Machine code, import tables or protected memory of loaded libraries are located and made writable.", "C++/CUDA"),
    Rule("profiler-control", _V, "The profiler's recording (CUPTI) is switched or read by the solution."),
    Rule("frame-access", _S, "Stack frames are looked at.", "Python"),
    Rule("address-access", _S, "Memory is accessed by address from Python, or through the interpreter's C interface.", "Python"),
    Rule("python-from-native", _S, "Native code runs Python code or changes Python objects.", "C++/CUDA"),
    Rule("native-library", _S, "A native library other than CUDA's is opened at run time."),
    Rule("constructor", _S, "Code runs while the library is being loaded.", "C++/CUDA"),
    Rule("modules-walk", _S, "The table of loaded modules is enumerated or changed.", "Python"),
    Rule("function-mode", _S, "A Torch function or dispatch mode is defined: torch calls made inside it go through the solution.", "Python"),
    Rule("signal-handler", _S, "Signal handlers or timers are installed."),
    Rule("symbol-lookup", _N, "Native code looks its own symbols up at run time (dlsym).", "C++/CUDA"),
    # -- other processes, the system ----------------------------------------------------------
    Rule("process-memory", _V, "Another process is read, traced or written to (/proc/<pid>, ptrace, process_vm_*, pidfd)."),
    Rule("signal-process", _V, "A process is signalled; no kernel needs to stop or end processes."),
    Rule("foreign-memory", _V, "Device memory of another process is opened (CUDA IPC handles)."),
    Rule("network", _V, "The network is used, or software is installed; a solution is complete as it is submitted."),
    Rule("clock-control", _V, "Clocks, power limits or modes of the device are changed."),
    Rule("system-write", _V, "A file outside the scratch folder is written."),
    Rule("sandbox-hostile", _V, "System call filters or sandbox rules are installed by the solution itself."),
    Rule("judge-import", _V, "The judge's own library is imported.", "Python"),
    Rule("early-exit", _V, "The process is ended from inside without a word.", "Python"),
    Rule("raw-syscall", _S, "System calls are made directly, past the C library."),
    Rule("process-info", _S, "Facts about processes are read (/proc, parent process, own memory map)."),
    Rule("subprocess", _S, "Programs are started."),
    Rule("fork", _S, "Processes are forked; their work must be over when run() returns."),
    Rule("file-access", _S, "Files are searched or read; inputs come as arguments."),
    Rule("file-write", _S, "A file is written."),
    Rule("shared-memory", _S, "Memory shared between processes is made or mapped."),
    Rule("environment-gate", _S, "Behaviour may depend on the environment or the command line (which are the same for all phases)."),
    Rule("resource-limits", _S, "Resource limits of the process are changed."),
    Rule("process-exit", _S, "The process may be ended; a check that ends it counts as a failure.", "Python, C++/CUDA"),
    # -- outputs that are not what they seem --------------------------------------------------
    Rule("tensor-subclass", _S, "A tensor subclass or wrapper is defined; returned as an output it could compute when it is read. Its cost is inside the timed window.", "Python"),
    Rule("lazy-container", _S, "A container subclass with its own iteration is defined; returned as outputs it could compute when it is unpacked.", "Python"),
    Rule("unjoined-work", _S, "A thread, stream or process is started and never waited for in this file; work left running after the answer is a violation."),
    Rule("pointer-key", _S, "Results may be kept by the address or version of a tensor; the judge changes contents behind the same address.", "Python"),
    Rule("input-attribute", _S, "Something is stored on an argument of run().", "Python"),
    Rule("storage-access", _S, "Memory outside the given view is reachable through the storage of an argument."),
    Rule("addresses-reviewer", _S, "A comment or text addresses whoever reviews the source, human or model. Text is no evidence."),
    # -- worth knowing -----------------------------------------------------------------------
    Rule("shape-literal", _N, "A shape is compared with literal sizes (shape dispatch; cheats special-case published shapes).", "Python"),
    Rule("call-count", _N, "Behaviour changes with the number of calls (self tuning; cheats tell checks from timing).", "Python"),
    Rule("clock-reading", _N, "Clocks are read (self tuning)."),
    Rule("numeric-flags", _N, "Global numeric settings are changed; they hold for this process only.", "Python"),
    Rule("rng-state", _N, "The random generator is seeded; inputs do not come from it.", "Python"),
    Rule("thread-count", _N, "The number of CPU threads is changed.", "Python"),
    Rule("l2-persistence", _N, "A persisting part of the L2 cache is reserved; every timed call has inputs of its own."),
    Rule("device-state", _N, "Variables live on the device between launches.", "C++/CUDA"),
    Rule("exit-hook", _N, "Code is registered to run when the process ends.", "Python"),
    Rule("llm-opinion", _S, "A language model that read the source has something to say. It is advice and decides nothing."),
    Rule("llm-not-judged", _N, "A language model was asked for and gave no usable answer: not judged, which does not mean clean."),
)  # fmt: skip

RULES: dict[str, Rule] = {rule.id: rule for rule in _ALL}
"""All rules by id."""
