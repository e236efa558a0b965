//! Tests that set up their state by driver calls: streams and threads of other contexts.

use super::{Context, ErrorKind, error::driver, handle::Handle};
use cudarc::driver::sys;
use std::ptr::null_mut;

/// The first GPU; without one, prints the reason.
fn context() -> Option<Context> {
    Context::open(0).inspect_err(|why| println!("skipped: {why}")).ok()
}

/// A second context besides the primary one, destroyed when dropped.
struct Other(Handle<sys::CUctx_st>);

impl Other {
    /// Makes the new context current, as a library with a context of its own does.
    fn new() -> Self {
        let mut context = null_mut();
        // SAFETY: every driver exports this function with this type; the device exists.
        unsafe {
            let create = sys::culib()
                .get::<unsafe extern "C" fn(*mut sys::CUcontext, u32, i32) -> sys::CUresult>(
                    b"cuCtxCreate_v2\0",
                )
                .expect("a function");
            assert_eq!(create(&mut context, 0, 0), sys::CUresult::CUDA_SUCCESS);
        }
        Self(Handle(context))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and destroyed once.
        unsafe { sys::cuCtxDestroy_v2(self.0.0) };
    }
}

fn current() -> sys::CUcontext {
    let mut current = null_mut();
    // SAFETY: the driver is loaded.
    unsafe { driver!(cuCtxGetCurrent(&mut current)) }.expect("a current context");
    current
}

#[test]
fn a_stream_of_another_context_is_refused() {
    let Some(context) = context() else { return };
    let other = Other::new();
    let mut stream = null_mut();
    // SAFETY: the other context is current.
    unsafe { driver!(cuStreamCreate(&mut stream, 1)) }.expect("a stream");
    let error = context.borrow_stream(stream as u64).expect_err("another context");
    assert_eq!(error.kind(), ErrorKind::Argument);
    assert!(error.to_string().contains("belongs to another context"), "{error}");
    // SAFETY: created above, and no longer used.
    unsafe { driver!(cuStreamDestroy_v2(stream)) }.expect("its end");
    drop(other);
    assert!(context.stream().is_ok());
}

#[test]
fn a_foreign_stream_is_borrowed_and_not_destroyed() {
    let Some(context) = context() else { return };
    let current = context.enter().expect("a context");
    let mut raw = null_mut();
    // SAFETY: the primary context is current, as in a library that shares it.
    unsafe { driver!(cuStreamCreate(&mut raw, 0)) }.expect("a stream");
    drop(current);
    let stream = context.borrow_stream(raw as u64).expect("ours");
    let mut bytes = [0; 16];
    let memory = stream.allocate(16).expect("memory");
    stream.write(memory.address(), &[3; 16]).expect("a write");
    drop(stream);
    let again = context.borrow_stream(raw as u64).expect("it is still there");
    again.read(memory.address(), &mut bytes).expect("a read");
    assert_eq!(bytes, [3; 16]);
    drop((memory, again));
    let _current = context.enter().expect("a context");
    // SAFETY: created above, and no longer used.
    unsafe { driver!(cuStreamDestroy_v2(raw)) }.expect("its end");
}

#[test]
fn the_callers_context_stays_current() {
    let Some(context) = context() else { return };
    let other = Other::new();
    assert_eq!(current(), other.0.0);
    let stream = context.stream().expect("a stream");
    let memory = stream.allocate(64).expect("memory");
    stream.write(memory.address(), &[1; 64]).expect("a write");
    let mut bytes = [0; 64];
    stream.read(memory.address(), &mut bytes).expect("a read");
    assert_eq!(bytes, [1; 64]);
    assert!(stream.capture(|| stream.fill(memory.address(), 2, 64)).is_ok());
    drop((memory, stream));
    assert_eq!(current(), other.0.0);
    drop(other);
    let none = current();
    context.synchronize().expect("nothing to wait for");
    assert_eq!(current(), none);
}

#[test]
fn memory_of_the_caller_is_checked_by_the_driver() {
    let Some(context) = context() else { return };
    let stream = context.stream().expect("a stream");
    let memory = stream.allocate(4096).expect("memory");
    let at = |address, bytes| {
        // SAFETY: the driver finds `memory` there, which outlives the result.
        unsafe { context.memory_at("q", address, bytes, None) }
    };
    let found = at(memory.address() + 256, 3840).expect("it is there");
    assert_eq!((found.address(), found.bytes()), (memory.address() + 256, 3840));
    assert_eq!(found.device() as usize, context.ordinal());
    let on_host = [0_u8; 64];
    for (address, bytes, expected) in [
        (on_host.as_ptr() as u64, 64, "is not memory of GPU 0"),
        (memory.address() + 256, usize::MAX >> 1, "are needed"),
    ] {
        let error = at(address, bytes).expect_err("no such memory").to_string();
        assert!(error.starts_with("q: pointer 0x") && error.contains(expected), "{error}");
    }
}
