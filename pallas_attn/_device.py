"""The one place that asks what GPU this is."""

import jax


def current() -> jax.Device:
    """The device that a call traced now will run on, as far as jax can tell before it runs."""
    chosen = jax.config.jax_default_device
    if chosen is None:
        return jax.devices()[0]
    return jax.devices(chosen)[0] if isinstance(chosen, str) else chosen


def gpu_generation() -> str | None:
    """Like "sm90" for an H100 or H200; None where the default device is not an NVIDIA GPU."""
    device = current()
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda") or capability is None:
        return None
    return "sm" + str(capability).replace(".", "")
