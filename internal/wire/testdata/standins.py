"""What golden.py puts in the place of the rest of SGLang, of NIXL and of the sockets."""
import importlib.abc
import importlib.machinery
import importlib.util
import types
from unittest.mock import MagicMock

AGENT = "5f0e3c1e-8b7d-4f5a-9a51-0d6b7f0c2a11"
REAL_PREFIXES = ("sglang.srt.disaggregation.nixl", "sglang.srt.disaggregation.common",
                 "sglang.srt.disaggregation.base", "sglang.srt.disaggregation.utils",
                 "sglang.srt.disaggregation.pp_consensus_store",
                 "sglang.srt.environ", "sglang.srt.utils.network")
# Read through runtime_context by the code that runs here.
PARALLEL = types.SimpleNamespace(tp_size=4, attn_tp_size=4, pp_size=2)
POLICY = types.SimpleNamespace(disaggregation_decode_allocation_policy="early")


class Blank(types.ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Takes the transfer modules from the release, everything else of it is blank."""

    def __init__(self, root):
        self.root = root

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ("sglang", "torch", "triton", "nixl"):
            return None
        if name.startswith(REAL_PREFIXES):
            base = self.root.joinpath(*name.split("."))
            if base.is_dir():
                return importlib.util.spec_from_file_location(
                    name, base / "__init__.py", submodule_search_locations=[str(base)])
            if base.with_suffix(".py").exists():
                return importlib.util.spec_from_file_location(name, base.with_suffix(".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Blank(spec.name)

    def exec_module(self, module):
        if module.__name__ == "sglang.srt.runtime_context":
            module.get_parallel = lambda: PARALLEL
            module.get_disagg = lambda: POLICY
        elif module.__name__ == "sglang.srt.utils":
            module.is_npu = module.is_hip = module.is_cuda = lambda: False
        elif module.__name__ == "nixl._bindings":
            for n in ("nixlBackendError", "nixlCancelledError", "nixlRemoteDisconnectError"):
                setattr(module, n, type(n, (Exception,), {}))


class Recorder:
    """A socket that keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send_multipart(self, frames):
        self.sent.append([bytes(f) for f in frames])

    def connect(self, *_):
        pass

    def take(self):
        sent, self.sent = self.sent, []
        return sent


class Agent:
    """A NIXL agent that keeps the notifications of what is posted."""

    name = AGENT

    def __init__(self, inbox=()):
        self.notifs, self.inbox = [], list(inbox)

    def get_agent_metadata(self):
        return bytes(range(256))

    def get_xfer_descs(self, *_a, **_k):
        return object()

    def initialize_xfer(self, _op, _src, _dst, _peer, notif=b""):
        return self._post(notif)

    def make_prepped_xfer(self, _op, _s, _si, _d, _di, notif=b""):
        return self._post(notif)

    def _post(self, notif):
        self.notifs.append(notif.decode("ascii"))
        return object()

    def send_notif(self, _peer, notif):
        self.notifs.append(notif.decode("ascii"))

    def transfer(self, _h):
        return "PROC"

    def check_xfer_state(self, _h):
        return "DONE"

    def get_new_notifs(self):
        got, self.inbox = self.inbox, []
        return {"peer": [m.encode("ascii") for m in got]} if got else {}


class Stop(BaseException):
    pass


class Queue:
    def __init__(self, items):
        self.items = list(items)

    def get(self):
        if not self.items:
            raise Stop
        return self.items.pop(0)
