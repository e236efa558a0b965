//! The report of `ptxas -v` on a kernel: its resources and remarks.

/// Resources of a kernel, and remarks about it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Registers per thread at launch.
    pub(crate) registers: u64,
    pub(crate) barriers: u64,
    /// Static shared memory in bytes, without dynamic shared memory.
    pub(crate) shared: u64,
    pub(crate) stack: u64,
    pub(crate) spill_stores: u64,
    pub(crate) spill_loads: u64,
    /// Remarks with a performance cost, in full.
    pub(crate) losses: Vec<String>,
    /// Codes of the other remarks.
    pub(crate) notes: Vec<String>,
}

impl Report {
    /// Parses the output of `ptxas -v` for one kernel; `None` if resources are missing.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut report = Self::default();
        let (mut used, mut spills) = (false, false);
        for line in text.lines() {
            for part in line.split([',', ':']).map(str::trim) {
                let Some((number, what)) = quantity(part) else { continue };
                let slot = match what {
                    "registers" => &mut report.registers,
                    "barriers" => &mut report.barriers,
                    "bytes smem" => &mut report.shared,
                    "bytes stack frame" => &mut report.stack,
                    "bytes spill stores" => &mut report.spill_stores,
                    "bytes spill loads" => &mut report.spill_loads,
                    _ => continue,
                };
                *slot = number;
                used |= what == "registers";
                spills |= what == "bytes spill stores";
            }
            report.remark(line);
        }
        (used && spills).then_some(report)
    }

    /// Records a line with a code, or a warning without one.
    fn remark(&mut self, line: &str) {
        let warning = line.starts_with("ptxas warning");
        let code = line.split_once("(C").and_then(|(_, rest)| rest.split_once(')')).map(|(code, _)| code);
        let code = code.filter(|code| code.bytes().all(|digit| digit.is_ascii_digit()));
        match code {
            Some(code) if !(warning || costs_speed(code) || line.contains("Performance Loss")) => {
                self.notes.push(format!("C{code}"));
            }
            None if !warning => {}
            _ => self.losses.push(line.trim().to_owned()),
        }
    }
}

/// 7508: `setmaxnreg` is ignored. 7510 to 7518: `wgmma` is serialized, or a wait is inserted. 7519: an inserted fence, which is
/// free.
fn costs_speed(code: &str) -> bool {
    matches!(code.parse(), Ok(7508 | 7510..=7518))
}

/// Splits `Used 168 registers` or `24 bytes smem` into number and unit.
fn quantity(part: &str) -> Option<(u64, &str)> {
    let part = part.strip_prefix("Used ").or(part.strip_prefix("used ")).unwrap_or(part);
    let (number, what) = part.split_once(' ')?;
    Some((number.parse().ok()?, what))
}

#[cfg(test)]
mod tests {
    use super::Report;

    const TEXT: &str = "\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 671 by compiler to allow use of registers
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    544 bytes stack frame, 1344 bytes spill stores, 1340 bytes spill loads
ptxas info    : Used 120 registers, used 2 barriers, 544 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 451.676 ms
";

    #[test]
    fn resources_are_parsed() {
        let report = Report::parse(TEXT).unwrap();
        let Report { registers, barriers, shared, stack, spill_stores, spill_loads, .. } = report;
        assert_eq!((registers, barriers, shared, stack), (120, 2, 1024, 544));
        assert_eq!((spill_stores, spill_loads), (1344, 1340));
        assert_eq!((report.notes, report.losses), (vec!["C7519".to_owned()], vec![]));
    }

    #[test]
    fn a_report_without_resources_is_none() {
        for missing in ["Used 120 registers", "1344 bytes spill stores"] {
            assert_eq!(Report::parse(&TEXT.replace(missing, "")), None, "{missing}");
        }
    }

    #[test]
    fn remarks_with_a_performance_cost_are_kept_in_full() {
        for remark in [
            "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized",
            "ptxas info    : (C7517) warpgroup.wait is injected in around line 800 by compiler",
            "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored",
            "ptxas info    : (C9999) Potential Performance Loss: something new",
            "ptxas warning : Unresolved extern variable",
        ] {
            let report = Report::parse(&format!("{remark}\n{TEXT}")).unwrap();
            assert_eq!(report.losses, [remark]);
        }
        let report = Report::parse(&format!("ptxas info : (C7520) all is well\n{TEXT}")).unwrap();
        assert_eq!((report.notes.len(), report.losses.len()), (2, 0));
    }
}
