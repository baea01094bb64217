"""What every entry point does around the call of a compiled function."""

from __future__ import annotations

import functools

import torch

__all__ = ["on_stream", "sms", "split_scratch", "without_rows"]


@functools.lru_cache(maxsize=64)
def sms(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def without_rows(
    q, k, v, g, beta, cu_seqlens, initial_state, scale, out, final_state, *_
) -> None:  # fmt: skip
    """No row belongs to a sequence: outputs are zero, states stay as they are."""
    out.zero_()
    if final_state is None:
        return
    if initial_state is None:
        final_state.zero_()
    elif initial_state.data_ptr() != final_state.data_ptr():
        final_state.copy_(initial_state)


def split_scratch(scratch, device):
    """What allocates images, and boundaries or None.

    They belong to one call: they come from torch's allocator, which gives them to a later call of
    the same stream only, so that calls in flight on two streams never share them.
    """
    ((slots, heads, elements), dtype), *others = scratch

    def allocate():
        boundaries = None
        for shape, kind in others:
            boundaries = torch.empty(shape, dtype=kind, device=device)
        return torch.empty(slots, heads, elements, dtype=dtype, device=device), boundaries

    return allocate


def on_stream(stream, device):
    """Context that makes the wanted stream and the tensors' device current, or None if they are."""
    if stream is None:
        # The tensors' device decides, not the current one.
        return None if device.index == torch.cuda.current_device() else torch.cuda.device(device)
    if isinstance(stream, bool) or not isinstance(stream, (int, torch.cuda.Stream)):
        raise TypeError(
            f"stream must be a torch.cuda.Stream, an integer handle or None, "
            f"not {type(stream).__name__}"
        )
    if isinstance(stream, int):
        if stream < 0:
            raise ValueError(f"stream={stream} is no stream handle")
        # Handle 0 is the default stream, not "none given".
        stream = (
            torch.cuda.ExternalStream(stream, device=device)
            if stream
            else torch.cuda.default_stream(device)
        )
    if stream.device != device:
        raise ValueError(f"stream is on {stream.device}, q on {device}; use a stream of q's device")
    return torch.cuda.stream(stream)
