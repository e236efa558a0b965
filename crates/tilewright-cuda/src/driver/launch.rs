//! Launches: a grid of a kernel, in the order of a stream.

use super::{Function, Result, Stream, args::with_args, error::driver, keep::Kept, signature::Signature};
use cudarc::driver::sys;
use std::{ffi::c_char, ptr::null_mut};
use tilewright_ptx::{ir::Kernel, sim::Arg};

impl Stream {
    /// Has the driver make machine code of a kernel, each time anew: [`Context::load`](super::Context::load).
    ///
    /// # Errors
    /// When the GPU lacks an instruction of it; when the assembler refuses it, with all that it says.
    pub fn load(&self, kernel: &Kernel) -> Result<Function> {
        self.context().load(kernel)
    }

    /// Launches a grid behind the work that was asked for up to now. Addresses among the arguments have to be those that the
    /// kernel expects: it reads and writes there.
    ///
    /// # Errors
    /// When arguments or grid are not what the kernel takes, with nothing launched; when the driver refuses.
    pub fn launch(&self, function: &Function, grid: [u32; 3], args: &[Arg]) -> Result<()> {
        self.launch_kernel(function, grid, args, false)
    }

    /// The same, but it may begin while the kernel before it on the stream still runs, as far as that lets it
    /// (`griddepcontrol.launch_dependents`): programmatic dependent launch. A kernel that does not wait for what it depends on
    /// (`griddepcontrol.wait`) would read what is not yet written; it is launched as by [`launch`](Self::launch), and so are all
    /// on GPUs before Hopper, and in graphs of drivers before CUDA 12.3.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub fn launch_dependent(&self, function: &Function, grid: [u32; 3], args: &[Arg]) -> Result<()> {
        self.launch_kernel(function, grid, args, true)
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
        let (_current, limits) = (self.context().enter()?, self.context().limits());
        let graph = self.captured_graph()?;
        // graphs have had such edges since CUDA 12.3
        let possible = limits.arch >= 90 && (graph.is_none() || limits.driver >= 12_030);
        let dependent = dependent && signature.waits && possible;
        let mut attributes = [cluster(signature.cluster), programmatic()];
        // those that are not asked for stand before or behind the others
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
            self.context().keep(graph, Kept::Module(function.module().clone()))?;
        }
        with_args(args, |params| {
            // SAFETY: there are as many parameters as the kernel has, each of its size; they live until the call returns.
            unsafe { driver!(cuLaunchKernelEx(&raw const config, function.raw(), params, null_mut())) }
        })
        .map_err(|error| {
            if error.code().is_some() { error.within(format!("kernel {}", function.name())) } else { error }
        })
    }
}

impl Function {
    /// How many clusters of it the GPU holds at once.
    ///
    /// # Errors
    /// When its kernel is not known, or has no clusters.
    pub fn clusters_of_gpu(&self) -> Result<u32> {
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
        // SAFETY: the function exists, and the place does.
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
