//! Memory: allocations of the host, copies between them, and the attributes of addresses.

use crate::{
    INVALID_HANDLE, INVALID_VALUE, SUCCESS, driver_functions, put,
    state::{Allocation, State, state},
};
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ffi::c_void,
};

const ALIGN: usize = 512;
const OUT_OF_MEMORY: i32 = 2;

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1).checked_next_multiple_of(ALIGN)?, ALIGN).ok()
}

fn allocate(to: *mut u64, bytes: usize, is_pinned: bool) -> i32 {
    let Some(layout) = layout(bytes) else { return OUT_OF_MEMORY };
    // SAFETY: the layout has at least one byte.
    let start = unsafe { alloc_zeroed(layout) } as u64;
    if start == 0 {
        return OUT_OF_MEMORY;
    }
    state().insert(Allocation { start, bytes: layout.size(), is_pinned });
    put(to, start)
}

fn free(start: u64) -> i32 {
    let Some(Allocation { bytes, .. }) = state().remove(start) else { return INVALID_VALUE };
    if let Some(layout) = layout(bytes) {
        // SAFETY: `allocate` made it with this layout, and it was removed from the allocations just now.
        unsafe { dealloc(start as *mut u8, layout) };
    }
    SUCCESS
}

/// Frees or copies in the order of a stream, which has to exist.
fn on_stream(stream: u64, work: impl FnOnce() -> i32) -> i32 {
    let outcome = state().check_stream(stream);
    if outcome == SUCCESS { work() } else { outcome }
}

/// Copies between allocations and memory of the host. Work of a captured stream is not executed.
fn copy(to: u64, from: u64, bytes: usize, device: &[u64], stream: u64) -> i32 {
    on_stream(stream, || {
        let state = state();
        if !device.iter().all(|&address| state.contains(address, bytes)) {
            return INVALID_VALUE;
        }
        if !state.captured.contains(&stream) {
            // SAFETY: the device's range is allocated, and the caller guarantees the other one.
            unsafe { (to as *mut u8).copy_from(from as *const u8, bytes) };
        }
        SUCCESS
    })
}

fn fill(to: u64, value: u8, bytes: usize, stream: u64) -> i32 {
    on_stream(stream, || {
        let state = state();
        if !state.contains(to, bytes) {
            return INVALID_VALUE;
        }
        if !state.captured.contains(&stream) {
            // SAFETY: the range is allocated.
            unsafe { (to as *mut u8).write_bytes(value, bytes) };
        }
        SUCCESS
    })
}

/// One attribute (`CUpointer_attribute`) of an address, in the width of its type.
fn attribute(state: &State, number: i32, to: *mut c_void, address: u64) -> i32 {
    let found = state.find(address);
    match number {
        2 => put(to.cast::<u32>(), found.map_or(0, |found| if found.is_pinned { 1 } else { 2 })),
        8 => put(to.cast::<u8>(), 0),
        9 => put(to.cast::<i32>(), found.map_or(-2, |_| 0)),
        11 => put(to.cast::<u64>(), found.map_or(0, |found| found.start)),
        12 => put(to.cast::<usize>(), found.map_or(0, |found| found.bytes)),
        _ => INVALID_VALUE,
    }
}

fn attributes(count: u32, numbers: *const i32, to: *const *mut c_void, address: u64) -> i32 {
    let state = state();
    for at in 0..count as usize {
        // SAFETY: the caller passes `count` numbers and as many locations.
        let (number, to) = unsafe { (*numbers.add(at), *to.add(at)) };
        if attribute(&state, number, to, address) != SUCCESS {
            return INVALID_VALUE;
        }
    }
    SUCCESS
}

fn free_unless_captured(address: u64, stream: u64) -> i32 {
    if state().captured.contains(&stream) { INVALID_HANDLE } else { on_stream(stream, || free(address)) }
}

driver_functions! {
    cuMemPoolCreate(pool: *mut u64, properties: *const c_void) => put(pool, state().handle());
    cuMemPoolSetAttribute(pool: u64, number: i32, value: *const c_void);
    cuMemAlloc_v2(address: *mut u64, bytes: usize) => allocate(address, bytes, false);
    cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: u64, stream: u64) =>
        on_stream(stream, || allocate(address, bytes, false));
    cuMemHostAlloc(address: *mut u64, bytes: usize, flags: u32) => allocate(address, bytes, true);
    cuMemFree_v2(address: u64) => free(address);
    cuMemFreeAsync(address: u64, stream: u64) => free_unless_captured(address, stream);
    cuMemFreeHost(address: u64) => free(address);
    cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) => copy(to, from, bytes, &[to], stream);
    cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) => copy(to, from, bytes, &[from], stream);
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) => copy(to, from, bytes, &[to, from], stream);
    cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: u64) => fill(to, value, bytes, stream);
    cuPointerGetAttributes(count: u32, numbers: *const i32, to: *const *mut c_void, address: u64) =>
        attributes(count, numbers, to, address);
}
