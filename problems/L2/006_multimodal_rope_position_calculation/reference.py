"""Three-axis rotary position ids for token rows that mix text, images and videos (Qwen2.5-VL)."""

import torch

SPATIAL_MERGE_SIZE = 2
IMAGE_TOKEN_ID = 151655
VIDEO_TOKEN_ID = 151656
VISION_START_TOKEN_ID = 151652
TOKENS_PER_SECOND = 2.0


def text_positions(start: int, length: int) -> torch.Tensor:
    """A ramp that is equal on the three axes, [3, length] int64."""
    return torch.arange(start, start + length).expand(3, -1)


def vision_positions(start: int, t: int, h: int, w: int, seconds_per_grid: float) -> torch.Tensor:
    """Time, height and width of every merged patch, time slowest; [3, t * h * w] int64."""
    # Seconds are float32, and so are their products.
    seconds = torch.arange(t, dtype=torch.float32) * seconds_per_grid
    time = (seconds * TOKENS_PER_SECOND).long()
    axes = torch.meshgrid(time, torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack(axes).flatten(1) + start


def row_segments(
    tokens: list[int], images: list[tuple], videos: list[tuple]
) -> tuple[list[torch.Tensor], int, int]:
    """Positions of one row, piece by piece.

    Args:
        tokens: the row's ids, padding left out.
        images, videos: (t, h, w, seconds per grid) of the items that earlier rows left.

    Returns:
        The segments, each [3, n], and how many images and videos the row used.
    """
    length = len(tokens)
    after_start = [tokens[i + 1] for i in range(length - 1) if tokens[i] == VISION_START_TOKEN_ID]
    num_images = after_start.count(IMAGE_TOKEN_ID)
    num_videos = after_start.count(VIDEO_TOKEN_ID)

    def find(token: int, start: int) -> int:
        return tokens.index(token, start) if token in tokens[start:] else length + 1

    segments: list[torch.Tensor] = []
    begin = used_images = used_videos = 0
    while used_images < num_images or used_videos < num_videos:
        image_at = find(IMAGE_TOKEN_ID, begin) if used_images < num_images else length + 1
        video_at = find(VIDEO_TOKEN_ID, begin) if used_videos < num_videos else length + 1
        end, is_image = min(image_at, video_at), image_at < video_at
        table, index = (images, used_images) if is_image else (videos, used_videos)
        if end > length or index == len(table):
            break
        t, h, w, seconds_per_grid = table[index]
        h, w = h // SPATIAL_MERGE_SIZE, w // SPATIAL_MERGE_SIZE
        start = int(segments[-1].max()) + 1 if segments else 0
        segments.append(text_positions(start, end - begin))
        segments.append(vision_positions(start + end - begin, t, h, w, seconds_per_grid))
        # The item's columns are counted from its own token on, not from the one after it.
        begin = end + t * h * w
        used_images, used_videos = used_images + is_image, used_videos + (not is_image)
    if begin < length:
        start = int(segments[-1].max()) + 1 if segments else 0
        segments.append(text_positions(start, length - begin))
    return segments, used_images, used_videos


def run(
    input_ids: torch.Tensor,
    image_grid_thw: torch.Tensor,
    video_grid_thw: torch.Tensor,
    second_per_grid_ts: torch.Tensor,
    attention_mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row on the host: the rows use up the tables of images and videos in order.

    Args:
        input_ids: [batch_size, seq_len] int64.
        image_grid_thw: [total_num_images, 3] int64, patches in time, height and width.
        video_grid_thw: [total_num_videos, 3] int64.
        second_per_grid_ts: [total_num_videos] f32, seconds between a video's time steps.
        attention_mask: [batch_size, seq_len] int64, 1 where there is a token.

    Returns:
        Position ids [3, batch_size, seq_len] int64 and, for each row, what to add to a later
        token's index to get its position, [batch_size, 1] int64.
    """
    batch_size, seq_len = input_ids.shape
    if not len(image_grid_thw) and not len(video_grid_thw):
        positions = (attention_mask.cumsum(dim=1) - 1).masked_fill(attention_mask == 0, 1)
        deltas = positions.amax(dim=1, keepdim=True) + 1 - seq_len
        return positions.expand(3, -1, -1), deltas

    rows, present = input_ids.cpu(), attention_mask.cpu() == 1
    images = [(*grid, 0.0) for grid in image_grid_thw.tolist()]
    seconds = second_per_grid_ts.tolist()
    videos = [(*grid, s) for grid, s in zip(video_grid_thw.tolist(), seconds, strict=True)]

    position_ids = torch.ones(3, batch_size, seq_len, dtype=torch.int64)
    deltas = torch.zeros(batch_size, 1, dtype=torch.int64)
    for b in range(batch_size):
        tokens = rows[b, present[b]].tolist()
        if VISION_START_TOKEN_ID not in tokens:
            position_ids[:, b, : len(tokens)] = torch.arange(len(tokens))
            continue
        segments, used_images, used_videos = row_segments(tokens, images, videos)
        images, videos = images[used_images:], videos[used_videos:]
        joined = torch.cat(segments, dim=1)
        columns = min(joined.shape[1], len(tokens))
        position_ids[:, b, :columns] = joined[:, :columns]
        deltas[b] = joined.max() + 1 - len(tokens)
    return position_ids.to(input_ids.device), deltas.to(input_ids.device)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Random text with small images and videos near the beginning of each row.

    Item i of either table goes to row i mod batch_size. Rows take their items off the tables in
    row order, and a row has its images before its videos.
    """
    batch_size, seq_len = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    num_images = axes_and_scalars["total_num_images"]
    num_videos = axes_and_scalars["total_num_videos"]

    def grids(count: int, longest: int) -> torch.Tensor:
        t = torch.randint(1, longest + 1, (count, 1), device=device)
        return torch.cat((t, 2 * torch.randint(1, 3, (count, 2), device=device)), dim=1)

    image_grid_thw, video_grid_thw = grids(num_images, 1), grids(num_videos, 2)
    items = [
        (token, iter((grid.prod(dim=1) // SPATIAL_MERGE_SIZE**2).tolist()))
        for token, grid in ((IMAGE_TOKEN_ID, image_grid_thw), (VIDEO_TOKEN_ID, video_grid_thw))
    ]
    input_ids = torch.randint(0, 50000, (batch_size, seq_len), device=device)
    for b in range(batch_size):
        position = 5
        for (token, sizes), total in zip(items, (num_images, num_videos), strict=True):
            for _ in range(b, total, batch_size):
                n = next(sizes)
                if position + n + 2 < seq_len:
                    input_ids[b, position] = VISION_START_TOKEN_ID
                    input_ids[b, position + 1] = token
                    input_ids[b, position + 2 : position + 2 + n] = 0
                    position += n + 5
    return {
        "input_ids": input_ids,
        "image_grid_thw": image_grid_thw,
        "video_grid_thw": video_grid_thw,
        "second_per_grid_ts": 0.5 + 0.5 * torch.rand(num_videos, device=device),
        "attention_mask": torch.ones_like(input_ids),
    }
