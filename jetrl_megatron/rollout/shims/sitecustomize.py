"""On PYTHONPATH of engine processes that have no torchvision: a stand-in for it.

SGLang imports torchvision at module level in multimodal code that text models never call. transformers asks whether the
package is available and must keep hearing "no".
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

_NAME = "torchvision"


class _Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        is_class = name[:1].isupper()
        value = type(name, (), {"__module__": self.__name__}) if is_class else _Stub(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        used_as_decorator = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if used_as_decorator else (lambda function: function)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != _NAME or self._asked_for_availability():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    @staticmethod
    def _asked_for_availability():
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "_is_package_available":
                return True
            frame = frame.f_back
        return False

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


if importlib.util.find_spec(_NAME) is None:
    sys.meta_path.append(_Finder())
