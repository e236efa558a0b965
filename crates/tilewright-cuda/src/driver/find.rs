//! The way from a number to a GPU that can be worked with.

use super::{Error, ErrorKind, Limits, Result, error::driver, limits::check_driver};
use cudarc::driver::sys;

/// A device that can be worked with.
pub(super) fn find(ordinal: usize) -> Result<(sys::CUdevice, Limits)> {
    let refused = |kind, why: String| Err(Error::of(kind, "context.open", why));
    // SAFETY: asks the loader for a library, whose initialisers are the driver's own.
    if !unsafe { sys::is_culib_present() } {
        let why = "there is no NVIDIA driver (libcuda.so or nvcuda.dll) on this machine";
        return refused(ErrorKind::NoDriver, why.into());
    }
    let (mut version, mut count, mut device) = (0, 0, 0);
    // SAFETY: there is a driver; this may be called before it is initialised.
    unsafe { driver!(cuDriverGetVersion(&mut version)) }.map_err(known)?;
    check_driver(version)?;
    // SAFETY: may be called any number of times.
    unsafe { driver!(cuInit(0)) }.map_err(known)?;
    // SAFETY: the driver is initialised.
    unsafe { driver!(cuDeviceGetCount(&mut count)) }?;
    if count == 0 {
        return refused(ErrorKind::NoGpu, "the driver sees no GPU".into());
    }
    let Some(number) = i32::try_from(ordinal).ok().filter(|number| *number < count) else {
        return refused(
            ErrorKind::NoGpu,
            format!("GPU {ordinal} is not in 0..{count}, which the driver sees"),
        );
    };
    // SAFETY: there are more devices than that.
    unsafe { driver!(cuDeviceGet(&mut device, number)) }?;
    Ok((device, Limits::of(device, version)?.check(ordinal)?))
}

/// Errors that mean something to a caller, by their codes; others are the driver's.
fn known(error: Error) -> Error {
    match error.code() {
        Some(34) => error.within("context.open").with(
            ErrorKind::NoDriver,
            "; libcuda.so is the toolkit's stub to link with: the NVIDIA driver's has to be found before it",
        ),
        Some(100) => error.within("context.open").with(ErrorKind::NoGpu, "; the driver sees no GPU"),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::{ErrorKind, known};
    use crate::driver::Error;

    #[test]
    fn what_the_driver_says_of_missing_things_is_told_apart() {
        for (code, kind, expected) in [
            (
                34,
                ErrorKind::NoDriver,
                "context.open: cuInit: CUDA_ERROR_STUB_LIBRARY; libcuda.so is the toolkit's stub",
            ),
            (100, ErrorKind::NoGpu, "context.open: cuInit: CUDA_ERROR_NO_DEVICE; the driver sees no GPU"),
            (803, ErrorKind::Driver, "cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ] {
            let name =
                expected.split(": ").last().and_then(|text| text.split(';').next()).unwrap_or_default();
            let error = known(Error::numbered("cuInit", code, name.into()));
            assert_eq!(error.kind(), kind);
            assert!(error.to_string().starts_with(expected), "{error}");
        }
    }
}
