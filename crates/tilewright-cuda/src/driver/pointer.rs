//! Validation of the caller's device pointers.

use super::{Context, DriverError, ErrorKind, Result, current::RelaxedCapture, error::driver};
use cudarc::driver::sys;
use std::{any::Any, sync::Arc};
use tilewright::tensor::DeviceMemory;

impl Context {
    /// Checks that `bytes` bytes at `address`, which errors call `what`, are memory of this GPU. An empty range may have any
    /// address.
    ///
    /// Costs about a microsecond: use it for external arguments, not per launch.
    ///
    /// # Errors
    /// For host memory, pinned or not; for memory of another GPU; for a range that exceeds its allocation.
    pub fn check_pointer(&self, what: &str, address: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let found = self.device_pointer(what, address)?;
        let end = u128::from(address) + bytes as u128;
        let of_allocation = u128::from(found.begin) + u128::from(found.bytes);
        // a driver that does not know the range reports size 0
        if found.bytes == 0 || end <= of_allocation {
            return Ok(());
        }
        let left = of_allocation.saturating_sub(u128::from(address));
        let why = format!(
            "pointer {address:#x} has {left} bytes behind it in its allocation of {}; {bytes} are needed",
            found.bytes
        );
        Err(DriverError::new(what, why))
    }

    /// Checks that the first and the last of `bytes` bytes at `address`, which errors call `what`, are memory of this GPU. They may be
    /// in different allocations: a tensor in mapped memory, as torch's expandable segments, has several.
    ///
    /// # Errors
    /// As [`Context::check_pointer`], except for ranges that exceed an allocation and end in another one.
    pub fn check_ends(&self, what: &str, address: u64, bytes: usize) -> Result<()> {
        let Some(last) = (bytes as u64).checked_sub(1) else { return Ok(()) };
        self.device_pointer(what, address)?;
        self.device_pointer(&format!("{what}, last of {bytes} bytes"), address.saturating_add(last)).map(drop)
    }

    /// The attributes of an address; an error if it is not memory of this GPU.
    fn device_pointer(&self, what: &str, address: u64) -> Result<PointerAttributes> {
        let found = self.pointer(address)?;
        let refused = |why: String| Err(DriverError::new(what, format!("pointer {address:#x} {why}")));
        let here = self.ordinal();
        match found.kind {
            MemoryType::Unknown => refused(format!(
                "is not memory of GPU {here}: the driver does not know it (memory of the host?)"
            )),
            MemoryType::Host if !found.managed => {
                refused(format!("is pinned memory of the host; it has to be memory of GPU {here}"))
            }
            MemoryType::Device if !found.managed && found.ordinal != here as i32 => {
                refused(format!("is memory of GPU {}; it has to be memory of GPU {here}", found.ordinal))
            }
            _ => Ok(found),
        }
    }

    /// Wraps the caller's memory as an argument of operators: `bytes` bytes at `address`, which errors call `what`, after
    /// [`Context::check_pointer`]. `owner` keeps the memory alive; if it is `None`, the caller does.
    ///
    /// # Safety
    /// The memory must stay valid and be used as [`DeviceMemory::from_raw`] requires. The driver can check neither its lifetime
    /// nor concurrent writes.
    ///
    /// # Errors
    /// As [`Context::check_pointer`].
    pub unsafe fn memory_at(
        &self,
        what: &str,
        address: u64,
        bytes: usize,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<DeviceMemory> {
        self.check_pointer(what, address, bytes)?;
        // SAFETY: the driver confirmed the range, and the caller guarantees the rest of `from_raw`'s contract.
        Ok(unsafe { DeviceMemory::from_raw(address, bytes, self.ordinal() as u32, owner) })
    }

    fn pointer(&self, address: u64) -> Result<PointerAttributes> {
        use sys::CUpointer_attribute_enum::{
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_IS_MANAGED,
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        };
        let mut attributes = [
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CU_POINTER_ATTRIBUTE_IS_MANAGED,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ];
        let mut values = [0_u64; 5];
        let mut outputs = values.each_mut().map(|value| (value as *mut u64).cast());
        let _current = self.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        // SAFETY: there is one output location of 8 bytes per attribute, the maximum size of an attribute.
        let outcome = unsafe {
            driver!(cuPointerGetAttributes(
                attributes.len() as u32,
                attributes.as_mut_ptr(),
                outputs.as_mut_ptr(),
                address
            ))
        };
        match outcome {
            // some drivers return an error for addresses for which others return no attributes
            Err(error) if error.kind() == ErrorKind::Driver && error.code() == Some(1) => {}
            other => other?,
        }
        let [kind, managed, ordinal, begin, bytes] = values;
        let kind = match kind as u32 {
            1 => MemoryType::Host,
            0 => MemoryType::Unknown,
            _ => MemoryType::Device,
        };
        Ok(PointerAttributes { kind, managed: managed != 0, ordinal: ordinal as u32 as i32, begin, bytes })
    }
}

/// The driver's attributes of an address.
struct PointerAttributes {
    kind: MemoryType,
    managed: bool,
    ordinal: i32,
    begin: u64,
    bytes: u64,
}

enum MemoryType {
    Unknown,
    Host,
    Device,
}
