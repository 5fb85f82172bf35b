from collections.abc import Mapping

from counterd.contract import Figures
from counterd.protocols.beanstalk._store import BeanstalkStore

def open_store(
    *,
    memory_limit: int,
    job_size_max: int,
    tubes: int,
    tube_jobs_max: int,
    figures: Figures,
    host: Mapping[str, object],
    journal_period_ns: int,
    journal_lag_ns: int,
    hash_key: bytes,
    now_ns: int,
) -> BeanstalkStore: ...
