//! Machine code: an assembler that accepts every text, and kernels with any name.

use crate::{driver_functions, put, state::state};
use std::ffi::{CStr, c_char, c_void};

/// The image that the assembler returns: the header of an ELF file for GPUs (machine 190) without segments and sections.
static IMAGE: [u8; 64] = {
    let mut image = [0; 64];
    [image[0], image[1], image[2], image[3]] = *b"\x7fELF";
    (image[4], image[5], image[18]) = (2, 1, 190);
    image
};

/// The name and the text of every error.
const ERROR: &CStr = c"error of the driver double";

/// An attribute of a kernel (`CUfunction_attribute`): the maximum number of threads, and registers.
fn attribute(number: i32) -> i32 {
    match number {
        0 => 1024,
        4 => 64,
        _ => 0,
    }
}

driver_functions! {
    cuLinkCreate_v2(count: u32, options: *const i32, values: *const c_void, link: *mut u64) =>
        put(link, state().handle());
    cuLinkAddData_v2(
        link: u64, kind: i32, data: *const c_void, bytes: usize, name: *const c_char, count: u32,
        options: *const i32, values: *const c_void
    );
    cuLinkComplete(link: u64, image: *mut *const u8, bytes: *mut usize) =>
        put(image, IMAGE.as_ptr()) | put(bytes, IMAGE.len());
    cuLinkDestroy(link: u64);
    cuModuleLoadDataEx(
        module: *mut u64, image: *const c_void, count: u32, options: *const i32, values: *const c_void
    ) => put(module, state().handle());
    cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) => put(function, state().handle());
    cuModuleUnload(module: u64);
    cuFuncGetAttribute(value: *mut i32, number: i32, function: u64) => put(value, attribute(number));
    cuFuncSetAttribute(function: u64, number: i32, value: i32);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(ctas: *mut i32, function: u64, threads: i32, shared: usize) =>
        put(ctas, 1);
    cuTensorMapEncodeTiled(map: *mut c_void);
    cuGetErrorName(code: i32, name: *mut *const c_char) => put(name, ERROR.as_ptr());
    cuGetErrorString(code: i32, text: *mut *const c_char) => put(text, ERROR.as_ptr());
}
