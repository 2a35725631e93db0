"""Records every Python process under ``lightning-otel run``, once it imports what is recorded.

``run`` puts this folder first on ``PYTHONPATH``, so every Python imports this file as it starts,
also one without lightning-otel and Python 2.7, in whose syntax it is kept. Whatever happens here,
the program starts as it would have, nothing is printed, and a ``sitecustomize`` of its own runs.
"""
# mypy: disallow_untyped_defs = False, disallow_untyped_calls = False

import os
import sys

LIBRARIES = frozenset(
    ("openai", "langchain_core", "langgraph", "autogen_core", "autogen_agentchat", "autogen_ext",
     "agents", "crewai", "litellm", "autogen", "ag2", "mcp", "anthropic", "groq", "together")
)  # fmt: skip
"""Packages with modules that the instrumentors patch: none is half made as they start."""
_CLIENTS = {
    "httpx": (("HTTPTransport", "handle_request"), ("AsyncHTTPTransport", "handle_async_request")),
    "httpx2": (("HTTPTransport", "handle_request"), ("AsyncHTTPTransport", "handle_async_request")),
    "aiohttp": (("ClientSession", "_request"),),
    "urllib3.connectionpool": (("HTTPConnectionPool", "urlopen"),),
}
"""HTTP clients, and what sends: too many programs import them to start for that alone."""
_WORDS = ("completion", "responses", "embed", "messages", "generate", "chat", "/v1/", "/model/")
"""What stands in the addresses that may ask a model: the first request to one starts it."""

_OURS = "lightning_otel"
_TELEMETRY = "opentelemetry."
"""Beginning of the modules of which the first starts the recording, which imports them whole."""
_OLDEST = (3, 11)
_PATIENCE_S = 10.0
_HANDED = "LIGHTNING_OTEL_RUN_SETTINGS"
"""What ``run`` sets in place of all others where they are for some processes alone."""
_SEPARATOR = "\x1f"
_WORKERS = {
    "multiprocessing.util": "spawnv_passfds",
    "loky.backend.fork_exec": "fork_exec",
    "joblib.externals.loky.backend.fork_exec": "fork_exec",
    "ray._private.services": "start_ray_process",
    "execnet.gateway_io": "create_io",
}
"""Functions that start workers of the program's own."""
_here = os.path.dirname(os.path.abspath(__file__))


class _Loader(object):
    def __init__(self, hook, loader):
        self.hook = hook
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self.loader
        self.hook.load(module, self.loader)


class _ImportHook(object):
    """Starts the recording at the first import of a library; until then it is a look-up."""

    def __init__(self, settings):
        self.settings = settings
        self.names = LIBRARIES | frozenset((_OURS,))
        self.workers = _WORKERS if settings.get("LIGHTNING_OTEL_CHILDREN") == "own" else {}
        self.watched = []
        from _thread import RLock  # Python 2 has no such module, and threading costs some

        self.make_lock = RLock
        self.renew()

    def renew(self):
        self.lock = self.make_lock()

    def forget(self):
        self.names = frozenset()

    def find_spec(self, name, path=None, target=None):
        is_client = name in _CLIENTS and self.names
        if not (name in self.names or name in self.workers or is_client):
            if not self._is_telemetry(name):
                return None
        if self.lock._is_owned():  # imported by what is being started
            return None
        spec = self._find(name, path, target)
        if hasattr(getattr(spec, "loader", None), "exec_module"):
            spec.loader = _Loader(self, spec.loader)
        return spec

    def _is_telemetry(self, name):
        if not (self.names and name.startswith(_TELEMETRY)):
            return False
        # Where our package imports it, the recording starts once that is whole.
        spec = getattr(sys.modules.get(_OURS), "__spec__", None)
        return not getattr(spec, "_initializing", False)

    def _find(self, name, path, target):
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None

    def load(self, module, loader):
        name = module.__name__
        if name in LIBRARIES:
            # As if it was not imported yet: what is patched in it is asked for now.
            previous = sys.modules.pop(name, None)
            try:
                self.start(name)
                spec = self._find(name, None, None)
            finally:
                if previous is not None:
                    sys.modules[name] = previous
            loader = getattr(spec, "loader", None) or loader
        elif name.startswith(_TELEMETRY):
            # None of them is half made yet; the import goes on with the one that stands there then.
            sys.modules.pop(name, None)
            self.start(name)
            if name in sys.modules:
                return
            sys.modules[name] = module
        loader.exec_module(module)
        if name in self.workers:
            function = self.workers[name]
            setattr(module, function, _hand_on(getattr(module, function), self.settings))
        elif name == _OURS:
            self.start(name)
        elif name in _CLIENTS:
            for owner, method in _CLIENTS[name]:
                self.watch(name, getattr(module, owner, None), method)

    def watch(self, name, owner, method):
        """Start the recording at the first request of a client that may ask a model."""
        original = getattr(owner, method, None)
        if original is None or not self.names:
            return

        def send(client, *args, **options):
            if self.names and _may_ask_model(args, options):
                self.start(name)  # which gives the client its own method back, and records it
                return getattr(client, method)(*args, **options)
            return original(client, *args, **options)

        send.__wrapped__ = original
        setattr(owner, method, send)
        self.watched.append((owner, method, send, original))

    def leave_clients(self):
        """Give clients their own methods back, where nobody else replaced them since."""
        for owner, method, ours, original in self.watched:
            if owner.__dict__.get(method) is ours:
                setattr(owner, method, original)
        self.watched = []

    def start(self, name):
        if not self.names or not self.lock.acquire(timeout=_PATIENCE_S):
            return
        try:
            if self.names:
                self.leave_clients()
                from lightning_otel.config import take_settings

                take_settings(self.settings)  # before the provider is imported, which reads some
                from lightning_otel.provider import start_run_child

                start_run_child()
        except Exception:  # noqa: BLE001  # a broken library, say; the program goes on
            _note(self.settings, name)
        finally:
            self.names = frozenset()
            self.lock.release()


def _may_ask_model(args, options):
    request = options.get("request", args[0] if args else None)
    method = options.get("method", getattr(request, "method", request))
    url = options.get("url", getattr(request, "url", args[1] if len(args) > 1 else ""))
    return str(method).upper() == "POST" and any(word in str(url) for word in _WORDS)


def _hand_on(function, settings):
    def start(*args, **options):
        before = os.environ.get("PYTHONPATH")
        os.environ[_HANDED] = _SEPARATOR.join(map("=".join, settings.items()))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_here, before]))
        try:
            return function(*args, **options)
        finally:
            os.environ.pop(_HANDED, None)
            _set_path(before)

    return start


def _set_path(path):
    if path:
        os.environ["PYTHONPATH"] = path
    else:
        os.environ.pop("PYTHONPATH", None)


def _take_settings():
    handed = os.environ.pop(_HANDED, None)
    if handed is None:
        return os.environ
    sys.path[:] = [path for path in sys.path if path != _here]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    _set_path(os.pathsep.join(path for path in paths if path != _here))
    return dict(pair.split("=", 1) for pair in handed.split(_SEPARATOR))


def _note(settings, library=""):
    place = "%s.d/unrecorded-%s" % tuple(
        settings.get(key, "") for key in ("LIGHTNING_OTEL_STORE", "TRACEPARENT")
    )
    line = "%s\t%s\n" % (library, sys.executable)
    try:
        file = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line if sys.version_info[0] == 2 else os.fsencode(line))
        finally:
            os.close(file)
    except (OSError, ValueError):  # the store is gone, or out of reach
        pass


def _start():
    settings = _take_settings()
    if sys.version_info < _OLDEST:
        _note(settings)
        return
    hook = _ImportHook(settings)
    if hook._find("lightning_otel", None, None) is None:
        _note(settings)
    sys.meta_path.insert(0, hook)
    is_alone = settings.get("LIGHTNING_OTEL_CHILDREN") == "none"
    os.register_at_fork(after_in_child=hook.forget if is_alone else hook.renew)
    if settings is not os.environ:
        os.execv = _hand_on(os.execv, settings)  # as launchers do, which become the program


def _run_shadowed():
    # A relative path is none of ours, and cannot be resolved where the working directory is gone.
    mine = os.path.realpath(_here)
    paths = [
        path
        for path in sys.path
        if path and not (os.path.isabs(path) and os.path.realpath(path) == mine)
    ]
    if sys.version_info[0] == 2:
        import imp

        try:
            place = imp.find_module("sitecustomize", paths)
        except ImportError:
            return
        imp.load_module("sitecustomize", *place)
        return
    from importlib._bootstrap import module_from_spec  # importlib.util costs 20 modules
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


try:
    _start()
finally:
    _run_shadowed()
