"""The ring buffer: fixed-size event slots in memory or in a file, and the table of the names that events refer to.

Engines write it and `timeline.decode` reads it. Another process can read a ring file while it is written, and after its
writer was killed.
"""

from .file_format import FIRST_STEP as FIRST_STEP
from .file_format import MAGIC as MAGIC
from .file_format import STACKS_SIGNAL as STACKS_SIGNAL
from .file_format import WORKERS as WORKERS
from .file_format import Record as Record
from .owner import find_rings as find_rings
from .owner import give_number as give_number
from .owner import newest_rings as newest_rings
from .owner import numbered_files as numbered_files
from .owner import stacks_path as stacks_path
from .owner import whole_run_path as whole_run_path
from .read_file import RingLog as RingLog
from .read_file import RingSnapshot as RingSnapshot
from .read_file import has_news as has_news
from .read_file import read_ring as read_ring
from .read_file import read_ring_records as read_ring_records
from .read_file import read_ring_role_and_rank as read_ring_role_and_rank
from .read_file import ring_serials as ring_serials
from .read_file import ring_state as ring_state
from .ring import NameTable as NameTable
from .ring import Ring as Ring
from .ring import WriteSlot as WriteSlot
from .slot_format import Events as Events
from .slot_format import Kind as Kind
