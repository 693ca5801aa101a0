"""Makes torchvision's PyPI wheel importable beside a torch without CUDA.

That wheel's operators are linked to CUDA, so they cannot be loaded there, and even the import ends
in "operator torchvision::nms does not exist": it registers what two operators return before
anything else. Here these two are declared, without any kernel, once torchvision is asked for. Its
transforms, tv_tensors and models need none of its operators; a call of one (nms, roi_align, ...)
raises torchvision's own RuntimeError, and `torchvision.extension._has_ops()` stays False.

tools/setup-frameworks puts this beside the packages, and a line `import torchvision_schemas` into a
.pth file there: Python runs that at each start, in workers too. torch is not imported by it.
"""

import sys
from importlib.abc import MetaPathFinder

_TWO = ("nms", "qnms")  # torchvision/_meta_registrations.py of 0.28
_kept = []  # what is declared goes away with its library


class BeforeTorchvision(MetaPathFinder):
    """Finds nothing, but is asked first."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                library = torch.library.Library("torchvision", "DEF")
                for operator in _TWO:
                    library.define(f"{operator}(Tensor dets, Tensor scores, float iou) -> Tensor")
                _kept.append(library)
        return None


sys.meta_path.insert(0, BeforeTorchvision())
