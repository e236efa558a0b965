//! Setting of the checked mode, in which operators verify their arguments in device memory and wait for their work.

use std::ffi::OsStr;
use tilewright::{Error, Result};

/// The environment variable that selects the checked mode.
pub const CHECK_VARIABLE: &str = "TILEWRIGHT_CHECK";

/// Reads `TILEWRIGHT_CHECK`: `1` for the checked mode, `0` or unset for none.
///
/// # Errors
/// If the variable has any other value.
pub fn checks_from_environment() -> Result<bool> {
    parse(std::env::var_os(CHECK_VARIABLE).as_deref())
}

fn parse(value: Option<&OsStr>) -> Result<bool> {
    match value.map(OsStr::as_encoded_bytes) {
        None | Some(b"" | b"0") => Ok(false),
        Some(b"1") => Ok(true),
        Some(_) => {
            let text = format!("{CHECK_VARIABLE} = {:?}, expected 1 or 0", value.unwrap_or_default());
            Err(Error::new("gpu.checks", text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn the_checked_mode_is_on_or_off() {
        let parsed = |text: &str| parse(Some(text.as_ref())).map_err(|why| why.to_string());
        assert_eq!((parse(None), parsed("")), (Ok(false), Ok(false)));
        assert_eq!((parsed("0"), parsed("1")), (Ok(false), Ok(true)));
        assert_eq!(parsed("yes"), Err("gpu.checks: TILEWRIGHT_CHECK = \"yes\", expected 1 or 0".into()));
    }
}
