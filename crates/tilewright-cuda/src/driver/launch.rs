//! Kernel launches on a stream.

use super::{
    Function, Result, Stream, args::with_args, error::driver, retain::Retained, signature::Signature,
};
use cudarc::driver::sys;
use std::{ffi::c_char, ptr::null_mut};
use tilewright_ptx::{ir::Kernel, sim::Arg};

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

impl Function {
    /// Occupancy: resident clusters on the whole GPU.
    ///
    /// # Errors
    /// If its kernel is unknown, or has no clusters.
    pub fn clusters_per_gpu(&self) -> Result<u32> {
        let signature: &Signature = self.signature()?;
        let mut attributes = [cluster(signature.cluster)];
        let config = sys::CUlaunchConfig {
            gridDimX: signature.cluster,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: signature.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: signature.shared,
            hStream: null_mut(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: 1,
        };
        let _current = self.context().enter()?;
        let mut clusters = 0;
        // SAFETY: the function exists, and `clusters` is valid.
        unsafe { driver!(cuOccupancyMaxActiveClusters(&mut clusters, self.raw(), &raw const config)) }?;
        Ok(clusters.cast_unsigned())
    }
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
