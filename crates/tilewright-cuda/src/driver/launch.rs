//! Kernel launches on a stream.

use super::{DriverError, Function, Result, Retained, Signature, Stream, error::driver, tensor_map::encode};
use cudarc::driver::sys;
use std::{
    ffi::{c_char, c_void},
    ptr::null_mut,
};
use tilewright_ptx::{Arg, Kernel, ir::ParamKind, isa::types::Class};

/// Capacity of the stack buffers of a launch: arguments, and 64-byte lines that hold them.
const MAX_ARGS: usize = 96;
const MAX_LINES: usize = 24;

impl Stream {
    /// Loads a kernel without a cache: [`Context::load`](super::Context::load).
    ///
    /// # Errors
    /// If the GPU lacks an instruction; if the assembler rejects the kernel; the error contains the whole log.
    pub fn load(&self, kernel: &Kernel) -> Result<Function> {
        self.context().load(kernel)
    }

    /// Launches a grid in stream order. The kernel reads and writes at the addresses among the arguments, so these must be valid
    /// for it. A kernel with `griddepcontrol.wait` is a programmatic dependent launch: it may start while its predecessor on the
    /// stream still runs, after that has executed `griddepcontrol.launch_dependents`. Before Hopper, and in graphs of drivers
    /// before CUDA 12.3, all launches are serialized.
    ///
    /// # Errors
    /// If arguments or grid do not match the kernel, with nothing launched; if the driver rejects the launch.
    pub fn launch(&self, function: &Function, grid: [u32; 3], args: &[Arg]) -> Result<()> {
        self.launch_kernel(function, grid, args, true)
    }

    /// Same, after the predecessor has ended.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub fn launch_serialized(&self, function: &Function, grid: [u32; 3], args: &[Arg]) -> Result<()> {
        self.launch_kernel(function, grid, args, false)
    }

    fn launch_kernel(
        &self,
        function: &Function,
        grid: [u32; 3],
        args: &[Arg],
        dependent: bool,
    ) -> Result<()> {
        let signature = function.signature()?;
        signature.check_launch(function.name(), grid, args)?;
        self.same_gpu("stream.launch", "the kernel", function.context())?;
        let (current, properties) = (self.context().enter()?, self.context().properties());
        let graph = self.captured_graph(&current)?;
        // graphs support programmatic edges since CUDA 12.3
        let possible = properties.arch >= 90 && (graph.is_none() || properties.driver >= 12_030);
        let dependent = dependent && signature.waits && possible;
        let mut attributes = [cluster(signature.cluster), programmatic()];
        // a contiguous range of the two attributes is passed
        let (first, count) = match (signature.cluster > 1, dependent) {
            (true, dependent) => (0, 1 + u32::from(dependent)),
            (false, dependent) => (1, u32::from(dependent)),
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: signature.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: signature.shared,
            hStream: self.raw(),
            attrs: attributes[first..].as_mut_ptr(),
            numAttrs: count,
        };
        if let Some(graph) = graph {
            self.context().retain(graph, Retained::Module(function.module().clone()))?;
        }
        with_args(args, |params| {
            // SAFETY: there is one pointer per parameter, to a value of its size; `check_launch` verified both. They live during
            // the call.
            unsafe { driver!(cuLaunchKernelEx(&raw const config, function.raw(), params, null_mut())) }
        })
        .map_err(|error| {
            if error.code().is_some() { error.within(format!("kernel {}", function.name())) } else { error }
        })
    }
}

impl Signature {
    /// Checks a launch by the rules of the driver, and by those that the driver does not check.
    fn check_launch(&self, name: &str, grid: [u32; 3], args: &[Arg]) -> Result<()> {
        let refused = |why| Err(DriverError::new(format!("launch of kernel {name}"), why));
        let [x, y, z] = grid;
        if !(1..=0x7fff_ffff).contains(&x) || !(1..=0xffff).contains(&y) || !(1..=0xffff).contains(&z) {
            return refused(format!(
                "a grid of {x} x {y} x {z} CTAs: there are 1..=2147483647 x 1..=65535 x 1..=65535"
            ));
        }
        if !x.is_multiple_of(self.cluster) {
            return refused(format!(
                "a grid of {x} CTAs in x cannot be cut into clusters of {}",
                self.cluster
            ));
        }
        if args.len() != self.params.len() {
            return refused(format!(
                "{} arguments came, it has {} parameters",
                args.len(),
                self.params.len()
            ));
        }
        for (param, arg) in self.params.iter().zip(args) {
            if param.kind != kind(arg) {
                return refused(format!("parameter {} is {:?}, but {arg:?} came", param.name, param.kind));
            }
            if let Arg::TensorMap(map) = arg
                && let Err(why) = map.check()
            {
                return refused(format!("parameter {}: {why}", param.name));
            }
        }
        Ok(())
    }
}

fn kind(arg: &Arg) -> ParamKind {
    match arg {
        Arg::U32(_) | Arg::I32(_) | Arg::F32(_) => ParamKind::Value(Class::B32),
        Arg::U64(_) => ParamKind::Value(Class::B64),
        Arg::TensorMap(_) => ParamKind::TensorMap,
    }
}

/// The alignment of tensor maps.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u64; 8]);

/// Calls `launch` with a pointer to each argument in the memory layout of the driver. Argument lists of the usual size stay on the stack.
fn with_args(args: &[Arg], launch: impl FnOnce(*mut *mut c_void) -> Result<()>) -> Result<()> {
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

fn cluster(ctas: u32) -> sys::CUlaunchAttribute {
    attribute(
        sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        sys::CUlaunchAttributeValue {
            clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: ctas, y: 1, z: 1 },
        },
    )
}

fn programmatic() -> sys::CUlaunchAttribute {
    attribute(
        sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    )
}

fn attribute(id: sys::CUlaunchAttributeID, value: sys::CUlaunchAttributeValue) -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute_st { id, pad: [0 as c_char; 4], value }
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
