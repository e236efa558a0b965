//! Kernel arguments in the memory layout of the driver, on the stack.

use super::{Result, tensor_map::encode};
use std::{ffi::c_void, ptr::null_mut};
use tilewright_ptx::sim::Arg;

/// Capacity of the stack buffers: arguments, and 64-byte lines that hold them.
const MAX_ARGS: usize = 96;
const MAX_LINES: usize = 24;

/// The alignment of tensor maps.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u64; 8]);

/// Calls `launch` with a pointer to each argument. Argument lists of the usual size stay on the stack.
pub(super) fn with_args(args: &[Arg], launch: impl FnOnce(*mut *mut c_void) -> Result<()>) -> Result<()> {
    let words = |arg: &Arg| if matches!(arg, Arg::TensorMap(_)) { 16 + 7 } else { 1 };
    let lines = args.iter().map(words).sum::<usize>().div_ceil(8);
    if args.len() <= MAX_ARGS && lines <= MAX_LINES {
        let (mut lines, mut pointers) = ([Line([0; 8]); MAX_LINES], [null_mut(); MAX_ARGS]);
        write_args(args, &mut lines, &mut pointers)?;
        return launch(pointers.as_mut_ptr());
    }
    let (mut lines, mut pointers) = (vec![Line([0; 8]); lines], vec![null_mut(); args.len()]);
    write_args(args, &mut lines, &mut pointers)?;
    launch(pointers.as_mut_ptr())
}

/// Writes the arguments one after the other, each tensor map at the start of a line.
fn write_args(args: &[Arg], lines: &mut [Line], pointers: &mut [*mut c_void]) -> Result<()> {
    let start = lines.as_mut_ptr().cast::<u64>();
    let mut at = 0_usize;
    let mut put = |at: usize, value: u64| lines[at / 8].0[at % 8] = value;
    for (arg, pointer) in args.iter().zip(pointers) {
        let scalar = match arg {
            Arg::U32(value) => u64::from(*value),
            Arg::I32(value) => u64::from(value.cast_unsigned()),
            Arg::F32(value) => u64::from(value.to_bits()),
            Arg::U64(value) => *value,
            Arg::TensorMap(map) => {
                at = at.next_multiple_of(8);
                *pointer = start.wrapping_add(at).cast();
                encode(map)?.into_iter().enumerate().for_each(|(i, word)| put(at + i, word));
                at += 16;
                continue;
            }
        };
        put(at, scalar);
        *pointer = start.wrapping_add(at).cast();
        at += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_address_the_arguments() {
        for copies in [1, 60] {
            let few = [Arg::U32(7), Arg::I32(-3), Arg::F32(1.5), Arg::U64(u64::MAX - 1)];
            let args: Vec<Arg> = few.iter().cloned().cycle().take(few.len() * copies).collect();
            let found = std::cell::RefCell::new(Vec::new());
            with_args(&args, |pointers| {
                for at in 0..args.len() {
                    // SAFETY: there are as many pointers as arguments, each to 8 readable bytes.
                    found.borrow_mut().push(unsafe { **pointers.add(at).cast::<*const u64>() });
                }
                Ok(())
            })
            .expect("nothing is refused");
            let expected = [7, 0xffff_fffd, 0x3fc0_0000, u64::MAX - 1];
            assert_eq!(found.into_inner(), expected.repeat(copies));
        }
    }
}
