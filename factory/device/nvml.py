"""What NVML says of one GPU: clocks, ECC, product.  Reads only; nothing is ever set.

The driver's own library is called directly, so no package is needed for it.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["Gauge"]

_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_STRING_BYTES = 96
_HIGH = 0.95
"""Share of the maximal clock above which nobody asks for a reason."""
_GPU_IDLE = 1
"""Among the reasons for the present clock."""


class _Pci(ctypes.Structure):
    _fields_ = [
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    ]


class Gauge:
    """One GPU by its UUID.

    Parameters
    ----------
    uuid : str

    Raises
    ------
    OSError
        If the library or the GPU is not there, or the driver declines.
    """

    def __init__(self, uuid: str) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        self._call(
            "nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid.encode()), ctypes.byref(self._handle)
        )
        self._number = ctypes.c_uint()
        self._by_number = ctypes.byref(self._number)
        self._clock_info = self._nvml.nvmlDeviceGetClockInfo
        self._sm = ctypes.c_uint(_CLOCK_SM)
        self._reasons = ctypes.c_ulonglong()
        self._by_reasons = ctypes.byref(self._reasons)
        self._clock_reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        self.max_sm_mhz = self._most(_CLOCK_SM)

    @classmethod
    def find(cls, uuid: str) -> Gauge | None:
        """The gauge, or None where NVML cannot be asked."""
        try:
            return cls(uuid)
        except (OSError, AttributeError):  # no such library, or no such function in it
            return None

    def sm_share(self) -> float | None:
        """SM clock now over its maximum; None if it cannot be read, or low for being idle."""
        if self._clock_info(self._handle, self._sm, self._by_number):
            return None
        share = self._number.value / self.max_sm_mhz
        if share < _HIGH and not self._clock_reasons(self._handle, self._by_reasons):
            return None if self._reasons.value & _GPU_IDLE else share
        return share

    def describe(self) -> dict[str, Any]:
        """Facts for a fingerprint; those that cannot be read are left out."""
        found: dict[str, Any] = {"max_sm_mhz": self.max_sm_mhz}
        pci, now, pending = _Pci(), ctypes.c_uint(), ctypes.c_uint()
        vbios = ctypes.create_string_buffer(_STRING_BYTES)
        limit = ctypes.c_uint()
        for ask in (
            lambda: {"max_memory_mhz": self._most(_CLOCK_MEMORY)},
            lambda: {
                "ecc": self._tell(
                    lambda n: bool(n.value),
                    now,
                    "nvmlDeviceGetEccMode",
                    ctypes.byref(now),
                    ctypes.byref(pending),
                )
            },
            lambda: {
                "pci_ids": self._tell(
                    lambda p: f"{p.pci_device_id:08x}:{p.pci_subsystem_id:08x}",
                    pci,
                    "nvmlDeviceGetPciInfo_v3",
                    ctypes.byref(pci),
                )
            },
            lambda: {
                "vbios": self._tell(
                    lambda b: b.value.decode(),
                    vbios,
                    "nvmlDeviceGetVbiosVersion",
                    vbios,
                    ctypes.c_uint(_STRING_BYTES),
                )
            },
            lambda: {
                "power_limit_w": self._tell(
                    lambda n: n.value // 1000,
                    limit,
                    "nvmlDeviceGetEnforcedPowerLimit",
                    ctypes.byref(limit),
                )
            },
        ):
            try:
                found.update(ask())
            except (OSError, AttributeError):
                continue
        return found

    def _most(self, clock: int) -> int:
        most = ctypes.c_uint()
        self._call(
            "nvmlDeviceGetMaxClockInfo", self._handle, ctypes.c_uint(clock), ctypes.byref(most)
        )
        if most.value == 0:
            raise OSError("nvmlDeviceGetMaxClockInfo: 0 MHz")
        return most.value

    def _tell(self, read: Any, into: Any, name: str, *arguments: Any) -> Any:
        self._call(name, self._handle, *arguments)
        return read(into)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._nvml, name)(*arguments):
            raise OSError(f"{name}: error {code}")
