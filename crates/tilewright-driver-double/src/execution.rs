//! Streams, events, captures, graphs and launches.

use crate::{CAPTURE_UNSUPPORTED, CONTEXT, INVALID_HANDLE, SUCCESS, driver_functions, put, state::state};
use std::ffi::c_void;

/// The part of `CUlaunchConfig` up to the stream.
#[repr(C)]
struct LaunchConfig {
    grid: [u32; 3],
    threads: [u32; 3],
    shared: u32,
    stream: u64,
}

/// Logs the stream of a launch as a line of its own, which its configuration has.
fn launch(config: *const LaunchConfig) -> i32 {
    // SAFETY: the driver API requires the address of a configuration.
    let LaunchConfig { stream, .. } = unsafe { config.read() };
    let mut state = state();
    state.log("launch", &[stream]);
    state.check_stream(stream)
}

fn create_stream(to: *mut u64) -> i32 {
    let mut state = state();
    let stream = state.handle();
    state.streams.insert(stream);
    put(to, stream)
}

fn destroy_stream(stream: u64) -> i32 {
    if state().streams.remove(&stream) { SUCCESS } else { INVALID_HANDLE }
}

fn existing(stream: u64, then: impl FnOnce() -> i32) -> i32 {
    let outcome = state().check_stream(stream);
    if outcome == SUCCESS { then() } else { outcome }
}

/// Calls that wait for a stream, which a capture does not allow.
fn wait(stream: u64) -> i32 {
    existing(stream, || if state().captured.contains(&stream) { CAPTURE_UNSUPPORTED } else { SUCCESS })
}

fn capture_info(stream: u64, status: *mut i32, graph: *mut u64) -> i32 {
    existing(stream, || {
        let is_captured = state().captured.contains(&stream);
        if !graph.is_null() {
            put(graph, if is_captured { stream } else { 0 });
        }
        put(status, i32::from(is_captured))
    })
}

fn begin_capture(stream: u64) -> i32 {
    existing(stream, || {
        state().captured.insert(stream);
        SUCCESS
    })
}

fn end_capture(stream: u64, graph: *mut u64) -> i32 {
    if state().captured.remove(&stream) { put(graph, stream) } else { INVALID_HANDLE }
}

driver_functions! {
    cuStreamCreate(stream: *mut u64, flags: u32) => create_stream(stream);
    cuStreamDestroy_v2(stream: u64) => destroy_stream(stream);
    cuStreamGetCtx(stream: u64, context: *mut u64) => existing(stream, || put(context, CONTEXT));
    cuStreamSynchronize(stream: u64) => wait(stream);
    cuStreamQuery(stream: u64) => wait(stream);
    cuStreamWaitEvent(stream: u64, event: u64, flags: u32) => existing(stream, || SUCCESS);
    cuStreamIsCapturing(stream: u64, status: *mut i32) => capture_info(stream, status, std::ptr::null_mut());
    cuStreamGetCaptureInfo_v2(
        stream: u64, status: *mut i32, id: *mut u64, graph: *mut u64, nodes: *mut c_void, count: *mut usize
    ) => capture_info(stream, status, graph);
    cuStreamBeginCapture_v2(stream: u64, mode: i32) => begin_capture(stream);
    cuStreamEndCapture(stream: u64, graph: *mut u64) => end_capture(stream, graph);
    cuThreadExchangeStreamCaptureMode(mode: *mut i32);
    cuEventCreate(event: *mut u64, flags: u32) => put(event, state().handle());
    cuEventDestroy_v2(event: u64);
    cuEventRecord(event: u64, stream: u64) => existing(stream, || SUCCESS);
    cuEventQuery(event: u64);
    cuEventSynchronize(event: u64);
    cuEventElapsedTime(milliseconds: *mut f32, start: u64, end: u64) => put(milliseconds, 0.0);
    cuLaunchKernelEx(config: *const LaunchConfig, function: u64, args: *const c_void, extra: *const c_void) =>
        launch(config);
    cuGraphInstantiateWithFlags(executable: *mut u64, graph: u64, flags: u64) => put(executable, state().handle());
    cuGraphLaunch(executable: u64, stream: u64) => existing(stream, || SUCCESS);
    cuGraphGetNodes(graph: u64, nodes: *mut c_void, count: *mut usize) => put(count, 0);
    cuGraphExecUpdate_v2(executable: u64, graph: u64, outcome: *mut c_void);
    cuGraphExecDestroy(executable: u64);
    cuGraphDestroy(graph: u64);
    cuGraphRetainUserObject(graph: u64, object: u64, count: u32, flags: u32);
    cuUserObjectCreate(object: *mut u64, value: *mut c_void, destroy: *const c_void, count: u32, flags: u32) =>
        put(object, state().handle());
    cuUserObjectRelease(object: u64, count: u32);
}
