//! Stand-in for `libcuda.so.1`: the functions that `tilewright-cuda` loads, with a log of their calls.
//!
//! It has one GPU with the attributes of an H100. Device memory is host memory, so copies and fills work. Launches do nothing, and each
//! copy is done when its call returns. Streams and allocations that do not exist are errors, as are calls that a capture does not allow.

#![allow(unsafe_code, reason = "exports C functions that write through the pointers of their callers")]

mod device;
mod execution;
mod memory;
mod modules;
mod state;

use state::state;
use std::ffi::c_char;

/// Codes of `CUresult`.
const SUCCESS: i32 = 0;
const INVALID_VALUE: i32 = 1;
const INVALID_HANDLE: i32 = 400;
const CAPTURE_UNSUPPORTED: i32 = 900;

/// The only context.
const CONTEXT: u64 = 0x1000;

/// Defines driver functions. Each logs its name and arguments, then evaluates its body; a function without a body only succeeds.
macro_rules! driver_functions {
    ($($name:ident($($arg:ident: $kind:ty),*) $(=> $body:expr)?;)+) => {
        $(
            // SAFETY: the name and the arguments are those that the CUDA driver API declares, and no other library exports them.
            #[unsafe(no_mangle)]
            extern "C" fn $name($($arg: $kind),*) -> i32 {
                crate::state::state().log(stringify!($name), &[$($crate::Word::word(&$arg)),*]);
                crate::driver_functions!(@ $($body)?)
            }
        )+
    };
    (@) => { $crate::SUCCESS };
    (@ $body:expr) => { $body };
}
use driver_functions;

/// An argument as a number.
trait Word {
    fn word(&self) -> u64;
}

macro_rules! words {
    ($($kind:ty),+) => {
        $(impl Word for $kind {
            fn word(&self) -> u64 {
                *self as u64
            }
        })+
    };
}
words!(u8, i32, u32, u64, usize);

impl<T> Word for *mut T {
    fn word(&self) -> u64 {
        *self as u64
    }
}

impl<T> Word for *const T {
    fn word(&self) -> u64 {
        *self as u64
    }
}

/// Writes a result to the location that the caller has passed.
fn put<T>(to: *mut T, value: T) -> i32 {
    if to.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the driver API requires callers to pass the address of a `T`.
    unsafe { to.write(value) };
    SUCCESS
}

/// Copies the log to `to`, at most `capacity` bytes, and returns its length in bytes. A line per call has the name of the function and
/// its arguments as numbers.
// SAFETY: no other library exports the name.
#[unsafe(no_mangle)]
extern "C" fn driver_double_log(to: *mut c_char, capacity: usize) -> usize {
    let state = state();
    let text = state.text();
    if !to.is_null() {
        // SAFETY: the caller guarantees `capacity` bytes, and the text is a buffer of its own.
        unsafe { to.copy_from_nonoverlapping(text.as_ptr().cast(), text.len().min(capacity)) };
    }
    text.len()
}

/// Empties the log.
// SAFETY: no other library exports the name.
#[unsafe(no_mangle)]
extern "C" fn driver_double_clear() {
    state().clear_log();
}

/// Splits the allocation around `address` into two there, as the driver reports memory that was mapped piece by piece.
// SAFETY: no other library exports the name.
#[unsafe(no_mangle)]
extern "C" fn driver_double_split(address: u64) {
    state().split(address);
}
