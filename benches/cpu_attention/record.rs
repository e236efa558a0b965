//! Results: the printed table, and the CSV kept in `benches/record/`.

use crate::{
    case::{Bound, Case, Form},
    chart::Bar,
    peer::PeerInfo,
    rounds::{Series, median, ratio},
};
use std::fmt::{self, Write as _};
use tilewright::Cpu;

/// Speedups are baseline time over own time; `time_ratio` is own time over baseline time.
const COLUMNS: &str = "case,seconds_median,seconds_min,rate,unit,ceiling,share,target,\
    baseline,speedup,speedup_expected,time_ratio,time_ratio_expected,bytes_ratio,bytes_ratio_expected,\
    torch_seconds,torch_speedup,torch_expected,torch_rows_seconds,torch_rows_speedup,torch_rows_expected";

/// Machine and command of a measurement; printed as the header comment of a record.
pub(crate) struct Machine {
    lines: Vec<(&'static str, String)>,
}

impl Machine {
    pub(crate) fn of(cpu: &Cpu, peer: Option<&PeerInfo>, command: String) -> Self {
        let peer = peer
            .map_or("none".to_owned(), |peer| format!("torch {}, {} threads", peer.version, peer.threads));
        let lines = vec![
            ("cpu", model()),
            ("threads", cpu.threads().to_string()),
            ("isa", cpu.isa().to_string()),
            ("peer", peer),
            ("command", command),
        ];
        Self { lines }
    }
}

/// The processor's name, from Linux.
fn model() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or("unknown", |(_, name)| name.trim()).to_owned()
}

impl Machine {
    /// Machine and peer on one line.
    pub(crate) fn summary(&self) -> String {
        let of = |key: &str| self.lines.iter().find(|(name, _)| *name == key).map_or("", |(_, value)| value);
        format!("{}, {} threads, {}; {}", of("cpu"), of("threads"), of("isa"), of("peer"))
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|(name, value)| writeln!(f, "# {name}: {value}"))
    }
}

/// A limit of a measured value.
#[derive(Clone, Copy)]
enum Limit {
    AtLeast(f64),
    AtMost(f64),
}

impl Limit {
    fn number(self) -> f64 {
        match self {
            Self::AtLeast(number) | Self::AtMost(number) => number,
        }
    }
}

/// A measured value, if available, with its expected limit.
struct Measure {
    /// Description, printed after the number.
    label: String,
    value: Option<f64>,
    limit: Option<Limit>,
    /// Printed only if it has a limit.
    optional: bool,
}

impl Measure {
    /// Whether the limit is met; `None` without a limit or a value.
    fn is_met(&self) -> Option<bool> {
        let value = self.value?;
        self.limit.map(|limit| match limit {
            Limit::AtLeast(least) => value >= least,
            Limit::AtMost(most) => value <= most,
        })
    }

    /// Value and limit as CSV cells, empty if absent.
    fn cells(&self) -> [String; 2] {
        let limit = self.limit.map(|limit| limit.number().to_string());
        [self.value.map_or(String::new(), |value| format!("{value:.3}")), limit.unwrap_or_default()]
    }
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.value.map_or("?".to_owned(), |value| format!("{value:.3}"));
        write!(f, "{value:>9}  {}", self.label)?;
        match self.limit {
            None => return Ok(()),
            Some(Limit::AtLeast(least)) => write!(f, ", at least {least}")?,
            Some(Limit::AtMost(most)) => write!(f, ", at most {most}")?,
        }
        f.write_str(match self.is_met() {
            Some(true) => ": met",
            Some(false) => ": MISSED",
            None => ": NOT MEASURED",
        })
    }
}

/// A case with all its measurements.
pub(crate) struct Outcome {
    name: String,
    median: f64,
    min: f64,
    /// Rate and ceiling, in 10⁹ of the unit.
    rate: f64,
    ceiling: f64,
    unit: &'static str,
    share: Measure,
    baseline: Option<String>,
    speedup: Measure,
    time_ratio: Measure,
    bytes_ratio: Measure,
    torch: (Option<f64>, Measure),
    torch_rows: (Option<f64>, Measure),
}

impl Outcome {
    pub(crate) fn new(case: &Case, own: &Series, baseline: Option<&Series>) -> Self {
        let seconds = median(&own.seconds);
        let (work, ceiling, unit) = match case.bound {
            Bound::Memory => (case.compulsory_bytes(), own.roofline.bytes_per_second, "GB/s"),
            Bound::Compute => (case.flops(), own.roofline.flops_per_second, "GFLOP/s"),
        };
        let rate = work as f64 / seconds;
        let over = case.baseline.clone().unwrap_or_default();
        let torch = |form, limit: Option<f64>, label: &str| {
            let its = own.peers.iter().find(|(of, _)| *of == form).map(|(_, seconds)| seconds);
            let speedup = its.map(|its| ratio(its, &own.seconds));
            let measure = Measure {
                label: label.to_owned(),
                value: speedup,
                limit: limit.map(Limit::AtLeast),
                optional: false,
            };
            (its.map(|its| median(its)), measure)
        };
        Self {
            name: case.name.clone(),
            median: seconds,
            min: own.seconds.iter().copied().fold(f64::INFINITY, f64::min),
            rate: rate / 1e9,
            ceiling: ceiling / 1e9,
            unit,
            share: Measure {
                label: "of the ceiling".to_owned(),
                value: Some(rate / ceiling),
                limit: case.target.map(Limit::AtLeast),
                optional: false,
            },
            baseline: case.baseline.clone(),
            speedup: Measure {
                label: format!("times as fast as {over}"),
                value: baseline.map(|its| ratio(&its.seconds, &own.seconds)),
                limit: case.speedup.map(Limit::AtLeast),
                optional: case.time_ratio.is_some(),
            },
            time_ratio: Measure {
                label: format!("times the time of {over}"),
                value: baseline.map(|its| ratio(&own.seconds, &its.seconds)),
                limit: case.time_ratio.map(Limit::AtMost),
                optional: true,
            },
            bytes_ratio: Measure {
                label: "times the bytes that have to be read".to_owned(),
                value: Some(own.kv_bytes as f64 / case.compulsory_bytes() as f64),
                limit: case.bytes_ratio.map(Limit::AtMost),
                optional: true,
            },
            torch: torch(Form::Gqa, case.peer_speedup, "times as fast as torch"),
            torch_rows: torch(
                Form::Rows,
                case.peer_rows_speedup,
                "times as fast as torch with groups as rows",
            ),
        }
    }

    /// All measures except times, in column order.
    fn measures(&self) -> [&Measure; 6] {
        [&self.share, &self.speedup, &self.time_ratio, &self.bytes_ratio, &self.torch.1, &self.torch_rows.1]
    }

    /// The chart bars of the comparisons with torch.
    pub(crate) fn bars(&self) -> impl Iterator<Item = Bar> {
        let forms = [("", &self.torch.1), (" (rows)", &self.torch_rows.1)];
        forms.into_iter().filter_map(|(form, measure)| {
            let expected = measure.limit.map(Limit::number);
            Some(Bar { label: format!("{}{form}", self.name), speedup: measure.value?, expected })
        })
    }

    fn cells(&self) -> Vec<String> {
        let seconds = |seconds: Option<f64>| seconds.map_or(String::new(), |s| format!("{s:.6}"));
        let mut cells = vec![
            self.name.clone(),
            seconds(Some(self.median)),
            seconds(Some(self.min)),
            format!("{:.2}", self.rate),
            self.unit.to_owned(),
            format!("{:.2}", self.ceiling),
        ];
        cells.extend(self.share.cells());
        cells.push(self.baseline.clone().unwrap_or_default());
        cells.extend(
            [&self.speedup, &self.time_ratio, &self.bytes_ratio].into_iter().flat_map(Measure::cells),
        );
        for (peer, measure) in [&self.torch, &self.torch_rows] {
            cells.push(seconds(*peer));
            cells.extend(measure.cells());
        }
        cells
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, median, rate, ceiling, unit, .. } = self;
        writeln!(f, "{name:36} {:9.3} ms  {rate:6.1} of {ceiling:6.1} {unit}", median * 1e3)?;
        let printed =
            |measure: &&&Measure| measure.limit.is_some() || measure.value.is_some() && !measure.optional;
        self.measures().iter().filter(printed).try_for_each(|measure| writeln!(f, "{measure}"))
    }
}

/// The number of limits met, and the list of those missed.
pub(crate) fn summarize(outcomes: &[Outcome]) -> String {
    let all = outcomes.iter().flat_map(|outcome| outcome.measures().map(|measure| (outcome, measure)));
    let expected: Vec<_> = all.filter(|(_, measure)| measure.limit.is_some()).collect();
    let met = expected.iter().filter(|(_, measure)| measure.is_met() == Some(true)).count();
    let mut text = format!("{met} of {} expectations are met", expected.len());
    for (outcome, measure) in expected.iter().filter(|(_, measure)| measure.is_met() != Some(true)) {
        let _ = write!(text, "\n  {:36} {measure}", outcome.name);
    }
    text
}

/// The record: the machine as comments, then one line per case.
pub(crate) fn csv(machine: &Machine, outcomes: &[Outcome]) -> String {
    let lines: String = outcomes.iter().map(|outcome| outcome.cells().join(",") + "\n").collect();
    format!("{machine}{COLUMNS}\n{lines}")
}
