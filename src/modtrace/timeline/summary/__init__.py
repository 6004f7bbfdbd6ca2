"""What each module of a timeline took, and each step, as tables in many forms."""

from .findings import Finding as Finding
from .flop_summary import FlopSummary as FlopSummary
from .flop_summary import StepFlops as StepFlops
from .module_rows import GpuTotals as GpuTotals
from .module_rows import GroupBy as GroupBy
from .module_rows import ModuleTimes as ModuleTimes
from .module_rows import outer_modules as outer_modules
from .module_summary import SORT_KEYS as SORT_KEYS
from .module_summary import Summary as Summary
from .step_bounds import find_step_bounds as find_step_bounds
from .step_bounds import take_steps as take_steps
from .step_times import StepTimes as StepTimes
from .step_times import find_typical_step as find_typical_step
from .step_times import measure_steps as measure_steps
from .step_times import warm_up_steps as warm_up_steps
from .steps_in_parts import PartTimes as PartTimes
from .totals import summarize as summarize
from .totals import summarize_pieces as summarize_pieces
from .units import RangeTimes as RangeTimes
