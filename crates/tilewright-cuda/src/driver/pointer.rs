//! Pointers of the caller: whether they are what they are said to be.

use super::{Context, Error, ErrorKind, Result, current::Apart, error::driver};
use cudarc::driver::sys;
use std::{any::Any, sync::Arc};
use tilewright::tensor::DeviceMemory;

impl Context {
    /// Whether `bytes` bytes at `address`, which the caller calls `what`, are memory of this GPU. For none of them any address will do.
    ///
    /// Costs about a microsecond: for arguments that come from outside, not for each launch.
    ///
    /// # Errors
    /// For memory of the host, pinned too; memory of another GPU; a range that goes beyond its allocation.
    pub fn check_pointer(&self, what: &str, address: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let found = self.pointer(address)?;
        let refused = |why: String| Err(Error::new(what, format!("pointer {address:#x} {why}")));
        let here = self.ordinal();
        match found.kind {
            Kind::Unknown => refused(format!(
                "is not memory of GPU {here}: the driver does not know it (memory of the host?)"
            )),
            Kind::Host if !found.managed => {
                refused(format!("is pinned memory of the host; it has to be memory of GPU {here}"))
            }
            Kind::Device if !found.managed && found.ordinal != here as i32 => {
                refused(format!("is memory of GPU {}; it has to be memory of GPU {here}", found.ordinal))
            }
            _ => {
                let end = u128::from(address) + bytes as u128;
                let of_allocation = u128::from(found.begin) + u128::from(found.bytes);
                // a driver that does not know the range says 0
                if found.bytes == 0 || end <= of_allocation {
                    return Ok(());
                }
                let left = of_allocation.saturating_sub(u128::from(address));
                refused(format!(
                    "has {left} bytes behind it in its allocation of {}; {bytes} are needed",
                    found.bytes
                ))
            }
        }
    }

    /// The caller's memory as an argument of operators: `bytes` bytes at `address`, which the caller calls `what`, after
    /// [`Context::check_pointer`] of them. They are kept by `owner` or, if it is `None`, by the caller.
    ///
    /// # Safety
    /// What the driver finds there now has to stay there as [`DeviceMemory::from_raw`] says. How long it does, and who else writes to
    /// it, no driver knows.
    ///
    /// # Errors
    /// As [`Context::check_pointer`].
    pub unsafe fn memory_at(
        &self,
        what: &str,
        (address, bytes): (u64, usize),
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<DeviceMemory> {
        self.check_pointer(what, address, bytes)?;
        // SAFETY: the memory is there, as the driver says, and stays there, as the caller does.
        Ok(unsafe { DeviceMemory::from_raw(address, bytes, self.ordinal() as u32, owner) })
    }

    fn pointer(&self, address: u64) -> Result<Pointer> {
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
        let mut places = values.each_mut().map(|value| (value as *mut u64).cast());
        let _current = self.enter()?;
        let _apart = Apart::enter()?;
        // SAFETY: there are as many places as attributes, each of 8 bytes, which is the most that any of them has.
        let outcome = unsafe {
            driver!(cuPointerGetAttributes(
                attributes.len() as u32,
                attributes.as_mut_ptr(),
                places.as_mut_ptr(),
                address
            ))
        };
        match outcome {
            // some drivers refuse what others have no attributes for
            Err(error) if error.kind() == ErrorKind::Driver && error.code() == Some(1) => {}
            other => other?,
        }
        let [kind, managed, ordinal, begin, bytes] = values;
        let kind = match kind as u32 {
            1 => Kind::Host,
            0 => Kind::Unknown,
            _ => Kind::Device,
        };
        Ok(Pointer { kind, managed: managed != 0, ordinal: ordinal as u32 as i32, begin, bytes })
    }
}

/// What the driver knows of an address.
struct Pointer {
    kind: Kind,
    managed: bool,
    ordinal: i32,
    begin: u64,
    bytes: u64,
}

enum Kind {
    Unknown,
    Host,
    Device,
}
