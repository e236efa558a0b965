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
    unsafe { driver!(cuDriverGetVersion(&mut version)) }?;
    check_driver(version)?;
    // SAFETY: may be called any number of times.
    match unsafe { driver!(cuInit(0)) } {
        Err(error) if error.code() == Some(sys::CUresult::CUDA_ERROR_NO_DEVICE as u32) => {
            return refused(ErrorKind::NoGpu, format!("the driver sees no GPU ({error})"));
        }
        initialised => initialised?,
    }
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
