//! Total and available memory, from Linux.

use serde::Serialize;
use std::fmt;

/// In bytes.
#[derive(Debug, Serialize, PartialEq)]
pub(super) struct Memory {
    /// The minimum of the machine's memory and the container's limit.
    total: u64,
    /// Available memory of the machine, at most `total`.
    available: u64,
}

/// `None` if the system does not report it.
pub(super) fn find() -> Option<Memory> {
    let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max").unwrap_or_default();
    read(&std::fs::read_to_string("/proc/meminfo").ok()?, &limit)
}

fn read(meminfo: &str, limit: &str) -> Option<Memory> {
    let bytes = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let (total, available) = (bytes("MemTotal:")?, bytes("MemAvailable:")?);
    let limit = limit.trim().parse().unwrap_or(u64::MAX); // "max" without a limit
    Some(Memory { total: total.min(limit), available: available.min(limit) })
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} GB, {:.1} GB available", self.total as f64 / 1e9, self.available as f64 / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::{Memory, read};

    #[test]
    fn a_smaller_container_limit_applies() {
        let meminfo = "MemTotal:       2000 kB\nMemFree:  1 kB\nMemAvailable:   1500 kB\n";
        let memory = |total, available| Some(Memory { total, available });
        assert_eq!(read(meminfo, "max\n"), memory(2_048_000, 1_536_000));
        assert_eq!(read(meminfo, ""), memory(2_048_000, 1_536_000));
        assert_eq!(read(meminfo, "1600000\n"), memory(1_600_000, 1_536_000));
        assert_eq!(read(meminfo, "1000\n"), memory(1000, 1000));
        assert_eq!(read("MemTotal: 1 kB\n", ""), None);
    }
}
