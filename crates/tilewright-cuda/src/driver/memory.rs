//! Memory of the device, in the order of a stream, and pointers of the caller.

use super::{Context, Error, ErrorKind, Result, Stream, context::Apart, error::driver};
use cudarc::driver::sys;

/// Memory of the device. When it is dropped it is given back behind the work that its stream was asked for until then; other
/// streams that use it have to be waited for first.
#[derive(Debug)]
pub struct Memory {
    address: u64,
    bytes: usize,
    stream: Stream,
}

impl Stream {
    /// So many bytes, which hold anything, for work that this stream is asked for from now on. Aligned to 256 bytes at least;
    /// for none there is an address, too.
    ///
    /// # Errors
    /// When there is too little memory, with what was asked for and what is free; while the stream is being captured. Nothing
    /// waits, unless memory seems to be short: then for what the stream has still to give back.
    pub fn allocate(&self, bytes: usize) -> Result<Memory> {
        let call = "memory.allocate";
        if self.is_captured()? {
            let why = "the stream is being captured: what a graph works on has to be allocated before it is captured";
            return Err(Error::new(call, why));
        }
        self.context().sweep();
        self.give_back_late();
        let _current = self.context().enter()?;
        let _apart = Apart::enter()?;
        let address = match self.allocated(bytes) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                // SAFETY: the stream exists.
                unsafe { driver!(cuStreamSynchronize(self.raw())) }?;
                self.allocated(bytes)
            }
            outcome => outcome,
        };
        let address = address.map_err(|error| match error.kind() {
            ErrorKind::OutOfMemory => error.with(ErrorKind::OutOfMemory, &self.shortage(bytes)).within(call),
            _ => error,
        })?;
        Ok(Memory { address, bytes, stream: self.clone() })
    }

    fn allocated(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        let bytes = bytes.max(1);
        // SAFETY: a context is current, and the stream belongs to it.
        unsafe {
            if self.context().limits().memory_pools {
                driver!(cuMemAllocAsync(&mut address, bytes, self.raw()))
            } else {
                driver!(cuMemAlloc_v2(&mut address, bytes))
            }
        }?;
        Ok(address)
    }

    fn shortage(&self, bytes: usize) -> String {
        let (context, limits) = (self.context(), self.context().limits());
        let free = match context.free_memory() {
            Ok((free, total)) => format!("{free} of {total} are free"),
            Err(_) => format!("it has {}", limits.memory),
        };
        format!("; {bytes} bytes were asked for, {free} on GPU {} ({})", context.ordinal(), limits.name)
    }
}

impl Memory {
    /// Its address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes were asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The stream in whose order it is given back.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.stream.give_back(self.address);
    }
}

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
