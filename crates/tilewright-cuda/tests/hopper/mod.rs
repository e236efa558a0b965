//! What the tests of kernels for Hopper begin with.

use tilewright_cuda::Stream;

/// The GPU, if there is one and it is a Hopper; otherwise says why the test is skipped.
pub(crate) fn device() -> Option<Stream> {
    match Stream::open(0) {
        Ok(device) if device.context().limits().arch == 90 => Some(device),
        Ok(device) => {
            println!(
                "skipped: {} is sm_{}, the kernel is for sm_90a",
                device.context().limits().name,
                device.context().limits().arch
            );
            None
        }
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}
