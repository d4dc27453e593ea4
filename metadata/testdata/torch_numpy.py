"""As much of torch as SGLang's MetadataBuffers needs, over numpy.

Indexing gives views, assignment converts to the tensor's type, and shapes that do not match
raise, as in torch. What MetadataBuffers does not use is not here.
"""
import types

import numpy as np


class DType:
    def __init__(self, name, np_type):
        self.name, self.np = name, np.dtype(np_type)


DTYPES = {n: DType(n, t) for n, t in dict(
    int32="<i4", int64="<i8", uint64="<u8", float32="<f4", float16="<f2",
    bfloat16="<u2",  # numpy has none; only copied here, never computed with
    bool="?").items()}


class Tensor:
    """A torch.Tensor over a numpy array; indexing gives views, as in torch."""
    device = "cpu"

    def __init__(self, a, dtype):
        self.a, self.dtype = a, dtype

    def __getitem__(self, key):
        return Tensor(self.a[key], self.dtype)

    def __setitem__(self, key, value):
        self.a[key] = value.a if isinstance(value, Tensor) else value

    def copy_(self, other):
        if self.dtype is not other.dtype:
            raise TypeError(f"copy_ from {other.dtype.name} to {self.dtype.name}")
        self.a[...] = other.a
        return self

    def fill_(self, value):
        self.a[...] = value
        return self

    def size(self, dim):
        return self.a.shape[dim]

    shape = property(lambda self: self.a.shape)
    nbytes = property(lambda self: self.a.nbytes)
    data_ptr = lambda self: self.a.ctypes.data
    clone = lambda self: Tensor(np.array(self.a), self.dtype)
    cpu = lambda self: self
    numpy = lambda self: self.a
    item = lambda self: self.a.item()
    tolist = lambda self: self.a.tolist()
    __lt__ = lambda self, v: Tensor(self.a < v, DTYPES["bool"])


torch = types.ModuleType("torch")
torch.__path__ = []
for n, d in DTYPES.items():
    setattr(torch, n, d)
torch.Tensor = Tensor
torch.zeros = lambda shape, dtype, device: Tensor(np.zeros(shape, dtype.np), dtype)
torch.full = lambda shape, v, dtype, device: Tensor(np.full(shape, v, dtype.np), dtype)
torch.tensor = lambda v, dtype, device: Tensor(np.array(v, dtype.np), dtype)
torch.from_numpy = lambda a: Tensor(a, next(d for d in DTYPES.values() if d.np == a.dtype))
torch.all = lambda t: Tensor(np.all(t.a), DTYPES["bool"])
