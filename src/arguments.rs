//! Arguments that several subcommands take: devices, dtypes, formats of weights, threads, and parsers of numbers, whose errors
//! name the flag and the range.

use clap::ValueEnum;
use miette::{IntoDiagnostic, Result};
use serde::Deserialize;
use std::{
    fmt,
    ops::{Bound, RangeBounds},
    str::FromStr,
};
use tilewright::{Cpu, Dtype, gemm::WeightFormat};

/// A compute device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    Cpu,
    /// The GPU with this ordinal of the driver.
    Cuda(usize),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = match text {
            "cpu" => return Ok(Self::Cpu),
            "cuda" => Some(0),
            _ => text.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
        };
        number.map(Self::Cuda).ok_or_else(|| "expected cpu, cuda or cuda:N".to_owned())
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// A [`Dtype`] by name.
#[derive(Debug, Clone, Copy, Default, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DtypeArg {
    F32,
    F16,
    #[default]
    Bf16,
}

impl From<DtypeArg> for Dtype {
    fn from(name: DtypeArg) -> Self {
        match name {
            DtypeArg::F32 => Self::F32,
            DtypeArg::F16 => Self::F16,
            DtypeArg::Bf16 => Self::Bf16,
        }
    }
}

/// A quantized [`WeightFormat`] by name.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum WeightsArg {
    /// 8.5 bits per weight
    Int8,
    /// 4.5 bits per weight
    Int4,
}

impl From<WeightsArg> for WeightFormat {
    fn from(name: WeightsArg) -> Self {
        match name {
            WeightsArg::Int8 => Self::Int8,
            WeightsArg::Int4 => Self::Int4,
        }
    }
}

/// The CPU backend with `threads` threads, by default one per core.
pub(crate) fn cpu(threads: Option<u16>) -> Result<Cpu> {
    threads.map_or_else(|| Ok(Cpu::new()), |threads| Cpu::with_threads(threads.into())).into_diagnostic()
}

/// Same, to run or measure on this machine; warns on standard error if it has fewer cores, unless `quiet`.
pub(crate) fn cpu_of_this_machine(threads: Option<u16>, quiet: bool) -> Result<Cpu> {
    let requested = threads.map_or(0, usize::from);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if requested > cores && !quiet {
        let s = if cores == 1 { "" } else { "s" };
        eprintln!("warning: --threads {requested} is above the {cores} core{s} of this machine");
    }
    cpu(threads)
}

/// A parser of integers in `range`.
pub(crate) fn integer<T: TryFrom<i128>>(
    range: impl RangeBounds<i128> + Clone + Send + Sync,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync {
    move |text| {
        let text = text.trim();
        let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
        if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
            return Err(format!("expected an integer, {}", describe(&range)));
        }
        let number = text.parse().ok().filter(|number| range.contains(number));
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| format!("{text} is not {}", describe(&range)))
    }
}

/// A parser of numbers in `range`, which errors call `name`.
pub(crate) fn number(
    name: &'static str,
    range: impl Fn(f32) -> bool + Clone + Send + Sync,
) -> impl Fn(&str) -> Result<f32, String> + Clone + Send + Sync {
    move |text| {
        let number = text.trim().parse::<f32>();
        number.ok().filter(|&number| range(number)).ok_or_else(|| format!("expected {name}"))
    }
}

/// `in 1..=1024`, or `at least 1`.
fn describe(range: &impl RangeBounds<i128>) -> String {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(start) => start + 1,
        Bound::Unbounded => 0,
    };
    match range.end_bound() {
        Bound::Included(end) => format!("in {start}..={end}"),
        Bound::Excluded(end) => format!("in {start}..{end}"),
        Bound::Unbounded => format!("at least {start}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{DeviceArg, integer, number};

    #[test]
    fn devices_have_three_spellings() {
        for (text, device) in
            [("cpu", DeviceArg::Cpu), ("cuda", DeviceArg::Cuda(0)), ("cuda:12", DeviceArg::Cuda(12))]
        {
            assert_eq!(text.parse(), Ok(device));
        }
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda 1", "CPU"] {
            assert!(text.parse::<DeviceArg>().is_err(), "{text:?}");
        }
        assert_eq!(DeviceArg::Cuda(1).to_string(), "cuda:1");
    }

    #[test]
    fn integers_outside_the_range_name_it() {
        let count = integer::<u16>(1..=1024);
        assert_eq!((count("1"), count(" 1024 ")), (Ok(1), Ok(1024)));
        let error = |text: &str| count(text).unwrap_err();
        assert_eq!(error("0"), "0 is not in 1..=1024");
        assert_eq!(error("-3"), "-3 is not in 1..=1024");
        assert_eq!(error(&"9".repeat(60)), format!("{} is not in 1..=1024", "9".repeat(60)));
        for text in ["", "-", "x", "1.5", "1e3", "+-1"] {
            assert_eq!(error(text), "expected an integer, in 1..=1024", "{text:?}");
        }
        let any = integer::<usize>(1..);
        assert_eq!(any(&usize::MAX.to_string()), Ok(usize::MAX));
        assert_eq!(any("0").unwrap_err(), "0 is not at least 1");
        assert_eq!(any("x").unwrap_err(), "expected an integer, at least 1");
    }

    #[test]
    fn numbers_outside_the_range_name_it() {
        let share = number("a number in (0, 1]", |p| p > 0.0 && p <= 1.0);
        assert_eq!((share("1"), share("0.5")), (Ok(1.0), Ok(0.5)));
        for text in ["0", "-0.5", "1.5", "nan", "inf", "x", ""] {
            assert_eq!(share(text).unwrap_err(), "expected a number in (0, 1]", "{text:?}");
        }
    }
}
