//! The device of the Hopper tests.

use tilewright_cuda::Stream;

/// The GPU if it is Hopper; otherwise prints why the test is skipped.
pub(crate) fn device() -> Option<Stream> {
    match Stream::open(0) {
        Ok(device) if device.context().properties().arch == 90 => Some(device),
        Ok(device) => {
            println!(
                "skipped: {} is sm_{}, the kernel is for sm_90a",
                device.context().properties().name,
                device.context().properties().arch
            );
            None
        }
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}
