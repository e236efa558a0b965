//! Device lookup by ordinal, with checks of driver and GPU.

use super::{DeviceProperties, DriverError, ErrorKind, Result, error::driver, properties::check_driver};
use cudarc::driver::sys;

/// A supported device.
pub(super) fn find(ordinal: usize) -> Result<(sys::CUdevice, DeviceProperties)> {
    let refused = |kind, why: String| Err(DriverError::of(kind, "context.open", why));
    #[cfg(not(feature = "linked"))] // a linked program does not start without the driver
    // SAFETY: loads a library by name; its initializers are the driver's.
    if !unsafe { sys::is_culib_present() } {
        let why = "there is no NVIDIA driver (libcuda.so or nvcuda.dll) on this machine";
        return refused(ErrorKind::NoDriver, why.into());
    }
    let (mut version, mut count, mut device) = (0, 0, 0);
    // SAFETY: the driver is loaded; this function may be called before `cuInit`.
    unsafe { driver!(cuDriverGetVersion(&mut version)) }.map_err(explain)?;
    check_driver(version)?;
    // SAFETY: the driver is loaded; repeated calls are allowed.
    unsafe { driver!(cuInit(0)) }.map_err(explain)?;
    // SAFETY: the driver is initialized, and `count` is valid.
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
    // SAFETY: the ordinal is below the device count, and `device` is valid.
    unsafe { driver!(cuDeviceGet(&mut device, number)) }?;
    Ok((device, DeviceProperties::of(device, version)?.check(ordinal)?))
}

/// Adds a kind and an explanation to errors with a explain cause.
fn explain(error: DriverError) -> DriverError {
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
    use super::{ErrorKind, explain};
    use crate::driver::DriverError;

    #[test]
    fn missing_drivers_and_devices_are_distinguished() {
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
            let error = explain(DriverError::numbered("cuInit", code, name.into()));
            assert_eq!(error.kind(), kind);
            assert!(error.to_string().starts_with(expected), "{error}");
        }
    }
}
