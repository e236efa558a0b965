//! The GPU, its attributes and its context.

use crate::{CONTEXT, INVALID_VALUE, SUCCESS, driver_functions, put};
use std::{cell::RefCell, ffi::c_char};

/// CUDA 13.0.
const VERSION: i32 = 13_000;
const MEMORY: usize = 80 << 30;
const NAME: &[u8] = b"driver double\0";

thread_local! {
    /// The stack of current contexts; 0 is none.
    static CURRENT: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// An attribute of an H100 by its number (`CUdevice_attribute`).
fn attribute(number: i32) -> i32 {
    match number {
        1 => 1024,         // threads per CTA
        8 => 48 << 10,     // shared memory per CTA without opt-in
        10 => 32,          // threads per warp
        12 | 82 => 65_536, // registers per CTA and per SM
        13 => 1_980_000,   // clock in kHz
        16 => 132,         // SMs
        36 => 2_619_000,   // memory clock in kHz
        37 => 5120,        // bits of the memory bus
        38 => 50 << 20,    // L2
        39 => 2048,        // threads per SM
        75 => 9,           // compute capability, major
        76 => 0,           // and minor
        81 => 228 << 10,   // shared memory per SM
        97 => 227 << 10,   // shared memory per CTA with opt-in
        _ => 1,            // features
    }
}

fn name(to: *mut c_char, len: i32) -> i32 {
    let len = usize::try_from(len).unwrap_or(0).min(NAME.len());
    // SAFETY: the caller guarantees the length of its buffer.
    unsafe { to.copy_from_nonoverlapping(NAME.as_ptr().cast(), len) };
    SUCCESS
}

fn push(context: u64) -> i32 {
    CURRENT.with_borrow_mut(|stack| stack.push(context));
    SUCCESS
}

driver_functions! {
    cuInit(flags: u32);
    cuDriverGetVersion(version: *mut i32) => put(version, VERSION);
    cuDeviceGetCount(count: *mut i32) => put(count, 1);
    cuDeviceGet(device: *mut i32, ordinal: i32) => if ordinal == 0 { put(device, 0) } else { INVALID_VALUE };
    cuDeviceGetName(to: *mut c_char, len: i32, device: i32) => name(to, len);
    cuDeviceGetAttribute(value: *mut i32, number: i32, device: i32) => put(value, attribute(number));
    cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) => put(bytes, MEMORY);
    cuDevicePrimaryCtxRetain(context: *mut u64, device: i32) => put(context, CONTEXT);
    cuCtxGetCurrent(context: *mut u64) =>
        put(context, CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0)));
    cuCtxPushCurrent_v2(context: u64) => push(context);
    cuCtxPopCurrent_v2(context: *mut u64) =>
        put(context, CURRENT.with_borrow_mut(|stack| stack.pop().unwrap_or(0)));
    cuCtxSynchronize();
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) => put(free, MEMORY) | put(total, MEMORY);
}
