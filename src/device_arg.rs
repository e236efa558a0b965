//! The `--device` argument: `cpu`, `cuda`, `cuda:1`.

use std::{fmt, str::FromStr};

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

#[cfg(test)]
mod tests {
    use super::DeviceArg;

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
}
