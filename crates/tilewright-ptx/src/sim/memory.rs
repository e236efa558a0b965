//! Device memory: allocations with unmapped gaps, and a bitmap of their initialized bytes.
//!
//! Allocation `i` begins at `(i + 1) << 32`, so a 32-bit offset never reaches another allocation.

use super::{Fault, FaultCause, FaultKind, Shadow};
use crate::isa::types::{Class, Scalar};

/// The content of uninitialized bytes: NaN as `f32` and `f16`, out of bounds as an index.
pub(super) const GARBAGE: u8 = 0xff;

/// Device memory.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    allocations: Vec<Allocation>,
    /// Accesses of the last launches, per allocation, as far as a dependent launch may begin before they end.
    pub(super) in_flight: Vec<Vec<Shadow>>,
}

#[derive(Debug, Clone)]
struct Allocation {
    bytes: Vec<u8>,
    /// One bit per byte.
    written: Vec<u64>,
}

/// A location in an allocation.
#[derive(Debug, Clone, Copy)]
pub(super) struct GlobalLocation {
    pub(super) allocation: usize,
    pub(super) offset: usize,
}

impl Memory {
    /// Memory without allocations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets the next launch begin after all others have ended, even if it is a dependent launch.
    pub fn serialize(&mut self) {
        self.in_flight.clear();
    }

    /// Allocates uninitialized bytes; the address is a multiple of 256.
    pub fn alloc(&mut self, bytes: usize) -> u64 {
        let written = vec![0; bytes.div_ceil(64)];
        self.allocations.push(Allocation { bytes: vec![GARBAGE; bytes], written });
        (self.allocations.len() as u64) << 32
    }

    /// Allocates and initializes an array.
    ///
    /// # Panics
    /// For `bool`, which has no width in memory.
    pub fn alloc_from<T: Scalar>(&mut self, values: &[T]) -> u64 {
        assert!(T::CLASS != Class::Pred, "predicates have no width in memory");
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.bits().to_le_bytes().into_iter().take(T::CLASS.bytes()))
            .collect();
        self.alloc_bytes(&bytes)
    }

    /// Allocates and initializes bytes.
    pub fn alloc_bytes(&mut self, bytes: &[u8]) -> u64 {
        let address = self.alloc(bytes.len());
        let location = GlobalLocation { allocation: self.allocations.len() - 1, offset: 0 };
        self.write_bytes(location, bytes);
        address
    }

    /// Writes bytes at an address, after all launches.
    ///
    /// # Errors
    /// When they are not inside one allocation.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        let location = self.locate(address, bytes.len());
        let location = location.map_err(|(kind, message)| Fault::of_launch(kind, message))?;
        self.serialize();
        self.write_bytes(location, bytes);
        Ok(())
    }

    /// Copies bytes at an address to `bytes`.
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn copy_to(&self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        let location = self.locate(address, bytes.len());
        let read = location.and_then(|location| self.read_bytes(location, bytes.len()));
        bytes.copy_from_slice(read.map_err(|(kind, message)| Fault::of_launch(kind, message))?);
        Ok(())
    }

    /// Copies bytes within the memory, in ascending order. Uninitialized bytes may be copied and stay uninitialized.
    ///
    /// # Errors
    /// When they are not inside one allocation.
    pub fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<(), Fault> {
        let fail = |(kind, message): FaultCause| Fault::of_launch(kind, message);
        let (from, to) = (self.locate(from, bytes).map_err(fail)?, self.locate(to, bytes).map_err(fail)?);
        self.serialize();
        for at in (0..bytes).step_by(16) {
            let count = (bytes - at).min(16);
            let moved = self.peek(GlobalLocation { offset: from.offset + at, ..from }, count);
            self.poke(GlobalLocation { offset: to.offset + at, ..to }, count, &moved);
        }
        Ok(())
    }

    /// Frees an allocation; a later use is a fault.
    pub fn free(&mut self, address: u64) {
        let number = (address >> 32) as usize;
        if let Some(found) = number.checked_sub(1).and_then(|at| self.allocations.get_mut(at)) {
            *found = Allocation { bytes: Vec::new(), written: Vec::new() };
        }
    }

    /// Reads `count` values at an address.
    ///
    /// # Errors
    /// When they are not inside one allocation, or are uninitialized.
    pub fn read<T: Scalar>(&self, address: u64, count: usize) -> Result<Vec<T>, Fault> {
        let wide = T::CLASS.bytes();
        let fail = |(kind, message): FaultCause| Fault::of_launch(kind, message);
        if wide == 0 {
            return Err(fail((FaultKind::BadArgument, "predicates have no width in memory".to_owned())));
        }
        let location = self.locate(address, count * wide).map_err(fail)?;
        let bytes = self.read_bytes(location, count * wide).map_err(fail)?;
        let value = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..wide].copy_from_slice(bytes);
            T::from_bits(u64::from_le_bytes(word))
        };
        Ok(bytes.chunks_exact(wide).map(value).collect())
    }

    /// Resolves an address of `bytes` bytes.
    pub(super) fn locate(&self, address: u64, bytes: usize) -> Result<GlobalLocation, FaultCause> {
        let (allocation, offset) = (((address >> 32) as usize).wrapping_sub(1), address as u32 as usize);
        match self.allocations.get(allocation) {
            Some(found) if offset + bytes <= found.bytes.len() => Ok(GlobalLocation { allocation, offset }),
            found => Err(out_of_bounds(address, bytes, found)),
        }
    }

    /// Reads initialized bytes.
    #[inline]
    pub(super) fn read_bytes(&self, location: GlobalLocation, bytes: usize) -> Result<&[u8], FaultCause> {
        let found = &self.allocations[location.allocation];
        if let Some(at) = first_unwritten(&found.written, location.offset, bytes) {
            let address = ((location.allocation as u64 + 1) << 32) + at as u64;
            return Err((
                FaultKind::Uninitialized,
                format!("global memory at {address:#x} was never written"),
            ));
        }
        Ok(&found.bytes[location.offset..location.offset + bytes])
    }

    /// Writes bytes. Returns whether that changed them.
    pub(super) fn write_bytes(&mut self, location: GlobalLocation, bytes: &[u8]) -> bool {
        let found = &mut self.allocations[location.allocation];
        write(&mut found.bytes, &mut found.written, location.offset, bytes)
    }

    /// Up to 16 bytes, and a mask of the initialized ones.
    pub(super) fn peek(&self, location: GlobalLocation, bytes: usize) -> ([u8; 16], u16) {
        let found = &self.allocations[location.allocation];
        peek(&found.bytes, &found.written, location.offset, bytes)
    }

    /// Writes a result of [`Memory::peek`].
    pub(super) fn poke(&mut self, location: GlobalLocation, bytes: usize, from: &([u8; 16], u16)) {
        let found = &mut self.allocations[location.allocation];
        poke(&mut found.bytes, &mut found.written, location.offset, bytes, from);
    }

    /// The size of each allocation.
    pub(super) fn sizes(&self) -> impl Iterator<Item = usize> {
        self.allocations.iter().map(|allocation| allocation.bytes.len())
    }
}

#[cold]
fn out_of_bounds(address: u64, bytes: usize, found: Option<&Allocation>) -> FaultCause {
    let (allocation, offset) = ((address >> 32).wrapping_sub(1), address as u32);
    let place = match found.map(|found| found.bytes.len()) {
        Some(size) => format!("which is byte {offset} of the {size} of allocation {allocation}"),
        None => "where no memory is mapped".to_owned(),
    };
    (FaultKind::OutOfBounds, format!("{bytes} bytes at {address:#x}, {place}"))
}

/// The words of a one-bit-per-byte bitmap that cover a byte range: index, and mask.
fn words(offset: usize, bytes: usize) -> impl Iterator<Item = (usize, u64)> {
    let end = offset + bytes;
    (offset / 64..end.div_ceil(64)).map(move |word| {
        let (from, to) = (offset.max(64 * word) % 64, end.min(64 * word + 64) - 64 * word);
        (word, (!0 << from) & (!0 >> (64 - to)))
    })
}

/// The first uninitialized byte of a range.
pub(super) fn first_unwritten(written: &[u64], offset: usize, bytes: usize) -> Option<usize> {
    // the most frequent access: initialized bytes of one word
    if bytes > 0 && offset % 64 + bytes <= 64 && !written[offset / 64] >> (offset % 64) << (64 - bytes) == 0 {
        return None;
    }
    let (word, missing) = words(offset, bytes)
        .map(|(word, bits)| (word, bits & !written[word]))
        .find(|(_, missing)| *missing != 0)?;
    Some(64 * word + missing.trailing_zeros() as usize)
}

/// Writes bytes and marks them as initialized. Returns whether that changed anything.
pub(super) fn write(bytes: &mut [u8], written: &mut [u64], offset: usize, from: &[u8]) -> bool {
    let into = &mut bytes[offset..offset + from.len()];
    if into == from && first_unwritten(written, offset, from.len()).is_none() {
        return false;
    }
    into.copy_from_slice(from);
    words(offset, from.len()).for_each(|(word, bits)| written[word] |= bits);
    true
}

/// Up to 16 bytes, and a mask of the initialized ones.
pub(super) fn peek(bytes: &[u8], written: &[u64], offset: usize, count: usize) -> ([u8; 16], u16) {
    let mut out = [0; 16];
    out[..count].copy_from_slice(&bytes[offset..offset + count]);
    let known = words(offset, count).fold(0, |known, (word, bits)| {
        known | u128::from(written[word] & bits) << (64 * (word - offset / 64))
    });
    (out, (known >> (offset % 64)) as u16)
}

/// Writes a result of [`peek`], including its initialization mask.
pub(super) fn poke(
    bytes: &mut [u8],
    written: &mut [u64],
    offset: usize,
    count: usize,
    from: &([u8; 16], u16),
) {
    bytes[offset..offset + count].copy_from_slice(&from.0[..count]);
    let known = u128::from(from.1) << (offset % 64);
    for (word, bits) in words(offset, count) {
        let known = (known >> (64 * (word - offset / 64))) as u64;
        written[word] = written[word] & !bits | known & bits;
    }
}
