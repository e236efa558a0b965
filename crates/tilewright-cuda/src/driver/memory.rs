//! Memory of the device: had and given back in the order of a stream.

use super::{Error, ErrorKind, Result, Stream, current::Apart, error::driver};

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
        if bytes > self.context().limits().memory {
            let why = format!("there is not so much memory{}", self.shortage(bytes));
            return Err(Error::of(ErrorKind::OutOfMemory, call, why));
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
