//! Device properties: name, properties and clocks of a GPU.

use super::{DriverError, ErrorKind, Result, error::driver};
use cudarc::driver::sys::{
    self,
    CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE as CLOCK, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH as BUS, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE as L2,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as OF_CTA,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR as OF_SM,
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE as MEMORY_CLOCK,
        CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED as POOLS,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
    },
};
use tilewright::Roofline;

/// Minimum driver version, in its own format: CUDA 12.0, the first with PTX 8.0.
const DRIVER: i32 = 12_000;
/// Minimum compute capability.
const ARCH: u32 = 80;

/// Properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceProperties {
    /// The driver's name of the GPU.
    pub name: String,
    /// Compute capability: 90 is `sm_90`.
    pub arch: u32,
    /// Number of SMs.
    pub multiprocessors: u32,
    /// Maximum shared memory per CTA in bytes, with opt-in.
    pub shared_per_cta: usize,
    /// Shared memory per SM in bytes, of which the system reserves 1 KiB per resident CTA.
    pub shared_per_sm: usize,
    /// L2 size in bytes.
    pub l2: usize,
    /// Device memory in bytes.
    pub memory: usize,
    /// Maximum SM clock in kHz; 0 if unknown.
    pub clock: u32,
    /// Memory clock in kHz, at double data rate; 0 if unknown.
    pub memory_clock: u32,
    /// Width of the memory bus in bits.
    pub memory_bus: u32,
    /// CUDA version of the driver: 13000 is 13.0.
    pub driver: u32,
    /// Whether stream-ordered allocation is supported.
    pub memory_pools: bool,
}

impl DeviceProperties {
    pub(super) fn of(device: sys::CUdevice, version: i32) -> Result<Self> {
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: the device exists, and `value` is valid.
            unsafe { driver!(cuDeviceGetAttribute(&mut value, attribute, device)) }?;
            Ok(value.cast_unsigned())
        };
        let mut name = [0_u8; 256];
        let mut memory = 0;
        // SAFETY: the device exists; `name` has the stated length, and its last byte stays 0.
        unsafe {
            driver!(cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32 - 1, device))?;
            driver!(cuDeviceTotalMem_v2(&mut memory, device))?;
        }
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(0);
        Ok(Self {
            name: String::from_utf8_lossy(&name[..end]).into_owned(),
            arch: attribute(MAJOR)? * 10 + attribute(MINOR)?,
            multiprocessors: attribute(MULTIPROCESSORS)?,
            shared_per_cta: attribute(OF_CTA)? as usize,
            shared_per_sm: attribute(OF_SM)? as usize,
            l2: attribute(L2)? as usize,
            memory,
            clock: attribute(CLOCK).unwrap_or(0),
            memory_clock: attribute(MEMORY_CLOCK).unwrap_or(0),
            memory_bus: attribute(BUS).unwrap_or(0),
            driver: version.cast_unsigned(),
            memory_pools: attribute(POOLS)? != 0,
        })
    }

    /// Peak throughput according to the clocks; `None` if the driver does not report them. With tensor cores: products of 16-bit
    /// elements with f32 accumulation; without: f32 multiply-adds.
    ///
    /// Operations per SM and cycle are from the throughput table of the CUDA C++ programming guide and, for tensor cores, from
    /// NVIDIA's architecture papers. Workstation variants may have twice the throughput of their consumer variants.
    pub fn roofline(&self, tensor_cores: bool) -> Option<Roofline> {
        let per_cycle = match (tensor_cores, self.arch) {
            (true, 80) => 2048,
            (true, 90) => 4096,
            (true, 100 | 103) => 8192,
            (true, 87) => 1024,
            (true, _) => 512,
            (false, 80) => 128,
            (false, _) => 256,
        };
        let flops = f64::from(self.multiprocessors) * f64::from(per_cycle) * f64::from(self.clock) * 1e3;
        let bytes = 2.0 * f64::from(self.memory_clock) * 1e3 * f64::from(self.memory_bus) / 8.0;
        (flops > 0.0 && bytes > 0.0).then_some(Roofline { bytes_per_second: bytes, flops_per_second: flops })
    }

    /// Rejects GPUs older than our kernels support.
    pub(super) fn check(self, ordinal: usize) -> Result<Self> {
        if self.arch >= ARCH {
            return Ok(self);
        }
        let why = format!(
            "GPU {ordinal} ({}) is sm_{}; it has to be sm_{ARCH} or newer (Ampere, Ada, Hopper, Blackwell)",
            self.name, self.arch
        );
        Err(DriverError::of(ErrorKind::UnsupportedGpu, "context.open", why))
    }
}

/// Rejects drivers that are older than our PTX version.
pub(super) fn check_driver(version: i32) -> Result<i32> {
    if version >= DRIVER {
        return Ok(version);
    }
    let shown = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
    let why = format!(
        "the NVIDIA driver is for CUDA {}; it has to be for CUDA {} or newer (driver R525), which knows PTX 8.0",
        shown(version),
        shown(DRIVER)
    );
    Err(DriverError::of(ErrorKind::DriverTooOld, "context.open", why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_drivers_and_gpus_are_refused_with_both_numbers() {
        assert_eq!(check_driver(12_000), Ok(12_000));
        assert_eq!(check_driver(13_010), Ok(13_010));
        let old = check_driver(11_080).expect_err("too old");
        assert_eq!(old.kind(), ErrorKind::DriverTooOld);
        assert!(old.to_string().contains("is for CUDA 11.8; it has to be for CUDA 12.0"), "{old}");
        let properties = |arch| DeviceProperties {
            name: "Some GPU".into(),
            arch,
            multiprocessors: 68,
            shared_per_cta: 65_536,
            shared_per_sm: 65_536,
            l2: 1 << 20,
            memory: 8 << 30,
            clock: 1_545_000,
            memory_clock: 7_000_000,
            memory_bus: 352,
            driver: 12_000,
            memory_pools: true,
        };
        assert!(properties(80).check(0).is_ok());
        let roofline = properties(80).roofline(false).expect("it has clocks");
        assert_eq!([roofline.bytes_per_second, roofline.flops_per_second], [616e9, 68.0 * 128.0 * 1.545e9]);
        assert_eq!(DeviceProperties { memory_clock: 0, ..properties(80) }.roofline(true), None);
        let old = properties(75).check(3).expect_err("too old");
        assert_eq!(old.kind(), ErrorKind::UnsupportedGpu);
        assert!(old.to_string().contains("GPU 3 (Some GPU) is sm_75; it has to be sm_80 or newer"), "{old}");
    }
}
