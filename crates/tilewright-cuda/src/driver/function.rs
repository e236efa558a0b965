//! Kernels as machine code, and launching them.

use super::{Device, Error, Result, error::called};
use cudarc::driver::{result, sys};
use std::{
    ffi::{CString, c_void},
    marker::PhantomData,
};
use tilewright_ptx::{
    ir::Kernel,
    sim::tensor::{Swizzle, TensorMap},
    text,
};

/// Bytes for what the assembler has to say.
const LOG: usize = 64 << 10;

/// A kernel that the driver has assembled.
#[derive(Debug)]
pub struct Function<'d> {
    module: sys::CUmodule,
    function: sys::CUfunction,
    threads: u32,
    cluster: u32,
    shared: u32,
    device: PhantomData<&'d Device>,
}

/// An argument of a kernel.
#[derive(Debug, Clone)]
pub enum Argument {
    /// 32 bits.
    U32(u32),
    /// 32 bits.
    F32(f32),
    /// An address, or 64 bits.
    U64(u64),
    /// A tensor map.
    TensorMap(TensorMap),
}

impl Device {
    /// Has the driver make machine code of a kernel.
    ///
    /// # Errors
    /// When the device lacks an instruction of it; when the driver refuses it, with the assembler's log.
    pub fn load(&self, kernel: &Kernel) -> Result<Function<'_>> {
        let arch = if kernel.since().specific { self.arch() } else { self.arch().min(120) };
        let ptx = text::ptx(kernel, arch).map_err(|why| Error::new("kernel.load", why.to_string()))?;
        let module = assemble(&kernel.name, &ptx)?;
        let name =
            CString::new(kernel.name.as_str()).map_err(|why| Error::new("kernel.load", why.to_string()))?;
        let shared = kernel.shared_layout().1 as u32;
        // SAFETY: the module has just been loaded, and lives as long as the function.
        let function = unsafe {
            let function = called("cuModuleGetFunction", result::module::get_function(module, name))?;
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let set = result::function::set_function_attribute(function, attribute, shared.cast_signed());
            called("cuFuncSetAttribute", set)?;
            function
        };
        let (threads, cluster) = (kernel.threads, kernel.cluster);
        Ok(Function { module, function, threads, cluster, shared, device: PhantomData })
    }
}

fn assemble(name: &str, ptx: &str) -> Result<sys::CUmodule> {
    use sys::CUjit_option::{CU_JIT_ERROR_LOG_BUFFER as BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as SIZE};
    let source = CString::new(ptx).map_err(|why| Error::new("kernel.load", why.to_string()))?;
    let mut log = vec![0_u8; LOG];
    let mut options = [BUFFER, SIZE];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), LOG as *mut c_void];
    let mut module = std::ptr::null_mut();
    // SAFETY: the source ends with 0; the options come with as many values, of the kinds that they ask for.
    let outcome = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            source.as_ptr().cast(),
            2,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    called("cuModuleLoadDataEx", outcome.result()).map_err(|error| {
        let end = log.iter().position(|&byte| byte == 0).unwrap_or(LOG);
        Error::new(format!("kernel {name}: {error}"), String::from_utf8_lossy(&log[..end]))
    })?;
    Ok(module)
}

impl Function<'_> {
    /// Launches a grid. Addresses among the arguments have to be those that the kernel expects: it reads and writes there.
    ///
    /// # Errors
    /// When the driver refuses an argument or the launch.
    pub fn launch(&self, grid: [u32; 3], arguments: &[Argument]) -> Result<()> {
        let mut storage = arguments.iter().map(stored).collect::<Result<Vec<Stored>>>()?;
        let mut pointers: Vec<*mut c_void> =
            storage.iter_mut().map(|stored| (&raw mut stored.0).cast()).collect();
        let mut attribute: sys::CUlaunchAttribute = sys::CUlaunchAttribute_st {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: self.cluster, y: 1, z: 1 },
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: std::ptr::null_mut(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(self.cluster > 1),
        };
        // SAFETY: as many arguments as the kernel has are the caller's to give; each lives until the call returns.
        let launched = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        called("cuLaunchKernelEx", launched.result())
    }
}

/// An argument as the driver reads it: the first bytes of these.
#[repr(C, align(64))]
struct Stored([u64; 16]);

fn stored(argument: &Argument) -> Result<Stored> {
    let mut words = [0; 16];
    match argument {
        Argument::U32(value) => words[0] = u64::from(*value),
        Argument::F32(value) => words[0] = u64::from(value.to_bits()),
        Argument::U64(value) => words[0] = *value,
        Argument::TensorMap(map) => words = encode(map)?,
    }
    Ok(Stored(words))
}

fn encode(map: &TensorMap) -> Result<[u64; 16]> {
    use sys::{
        CUtensorMapDataType::{
            CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 as B16, CU_TENSOR_MAP_DATA_TYPE_FLOAT32 as B32,
            CU_TENSOR_MAP_DATA_TYPE_UINT8 as B8, CU_TENSOR_MAP_DATA_TYPE_UINT64 as B64,
        },
        CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as ZEROS,
        CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE as DENSE,
        CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B as PROMOTION,
        CUtensorMapSwizzle as Swizzling,
    };
    map.check().map_err(|why| Error::new("kernel.launch", why))?;
    let element = match map.element_bytes {
        1 => B8,
        2 => B16,
        4 => B32,
        _ => B64,
    };
    let swizzle = match map.swizzle {
        Swizzle::None => Swizzling::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::B32 => Swizzling::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::B64 => Swizzling::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::B128 => Swizzling::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let steps = [1; 5];
    let mut encoded = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the map was checked: dimensions, strides and sides of the box are as many as its rank says.
    let outcome = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut encoded,
            element,
            map.dims.len() as u32,
            map.address as *mut c_void,
            map.dims.as_ptr(),
            map.strides.as_ptr(),
            map.box_dims.as_ptr(),
            steps.as_ptr(),
            DENSE,
            swizzle,
            PROMOTION,
            ZEROS,
        )
    };
    called("cuTensorMapEncodeTiled", outcome.result())?;
    Ok(encoded.opaque)
}

impl Drop for Function<'_> {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`, and nobody else has it. An error here has nobody to tell.
        let _ = unsafe { result::module::unload(self.module) };
    }
}
