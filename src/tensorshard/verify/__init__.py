"""Is what some ranks compute what one device would? Runs are recorded and compared, and the first fault is named."""

from typing import TYPE_CHECKING

from tensorshard.common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from tensorshard.verify.culprit import Culprit
    from tensorshard.verify.layouts import verify_layout
    from tensorshard.verify.verification import Verification
    from tensorshard.verify.verify import verify

__all__ = ["Culprit", "Verification", "verify", "verify_layout"]

__getattr__ = lazy_imports(
    __name__,
    {
        "Culprit": "tensorshard.verify.culprit",
        "Verification": "tensorshard.verify.verification",
        "verify": "tensorshard.verify.verify",
        "verify_layout": "tensorshard.verify.layouts",
    },
)
