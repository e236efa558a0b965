//! Device memory: allocations with unmapped gaps between them, and which of their bytes were ever written.
//!
//! Allocation `i` begins at `(i + 1) << 32`, so that no offset of 32 bits leads from one into another.

use super::fault::{Fault, FaultKind, Trouble};
use crate::isa::types::{Class, Scalar};

/// What bytes hold before anybody writes them: as `f32` and `f16` a NaN, as an index far outside.
pub(super) const GARBAGE: u8 = 0xff;

/// Device memory.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    allocations: Vec<Allocation>,
}

#[derive(Debug, Clone)]
struct Allocation {
    bytes: Vec<u8>,
    /// One bit for each byte.
    written: Vec<u64>,
}

/// Bytes of an allocation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) allocation: usize,
    pub(super) offset: usize,
}

impl Memory {
    /// Without allocations.
    pub fn new() -> Self {
        Self::default()
    }

    /// So many bytes that nobody wrote; the address is a multiple of 256.
    pub fn alloc(&mut self, bytes: usize) -> u64 {
        let written = vec![0; bytes.div_ceil(64)];
        self.allocations.push(Allocation { bytes: vec![GARBAGE; bytes], written });
        (self.allocations.len() as u64) << 32
    }

    /// Bytes that hold these values, one after the other.
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

    /// Bytes that hold these.
    pub fn alloc_bytes(&mut self, bytes: &[u8]) -> u64 {
        let address = self.alloc(bytes.len());
        let place = Place { allocation: self.allocations.len() - 1, offset: 0 };
        self.write_bytes(place, bytes);
        address
    }

    /// Writes bytes from an address on.
    ///
    /// # Errors
    /// Where they are not inside of one allocation.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        let place = self.place(address, bytes.len());
        let place = place.map_err(|(kind, message)| Fault::of_launch(kind, message))?;
        self.write_bytes(place, bytes);
        Ok(())
    }

    /// Copies bytes from an address on.
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn copy_to(&self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        let place = self.place(address, bytes.len());
        let read = place.and_then(|place| self.read_bytes(place, bytes.len()));
        bytes.copy_from_slice(read.map_err(|(kind, message)| Fault::of_launch(kind, message))?);
        Ok(())
    }

    /// Copies bytes within the memory, from the first to the last. Those that nobody wrote may be copied, and stay such.
    ///
    /// # Errors
    /// Where they are not inside of one allocation.
    pub fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<(), Fault> {
        let fail = |(kind, message): Trouble| Fault::of_launch(kind, message);
        let (from, to) = (self.place(from, bytes).map_err(fail)?, self.place(to, bytes).map_err(fail)?);
        for at in (0..bytes).step_by(16) {
            let count = (bytes - at).min(16);
            let moved = self.peek(Place { offset: from.offset + at, ..from }, count);
            self.poke(Place { offset: to.offset + at, ..to }, count, &moved);
        }
        Ok(())
    }

    /// Gives an allocation back: whoever uses it again makes a fault.
    pub fn free(&mut self, address: u64) {
        let number = (address >> 32) as usize;
        if let Some(found) = number.checked_sub(1).and_then(|at| self.allocations.get_mut(at)) {
            *found = Allocation { bytes: Vec::new(), written: Vec::new() };
        }
    }

    /// `count` values from an address on.
    ///
    /// # Errors
    /// Where they are not inside of one allocation, or were not written.
    pub fn read<T: Scalar>(&self, address: u64, count: usize) -> Result<Vec<T>, Fault> {
        let wide = T::CLASS.bytes();
        let fail = |(kind, message): Trouble| Fault::of_launch(kind, message);
        if wide == 0 {
            return Err(fail((FaultKind::BadArgument, "predicates have no width in memory".to_owned())));
        }
        let place = self.place(address, count * wide).map_err(fail)?;
        let bytes = self.read_bytes(place, count * wide).map_err(fail)?;
        let value = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..wide].copy_from_slice(bytes);
            T::from_bits(u64::from_le_bytes(word))
        };
        Ok(bytes.chunks_exact(wide).map(value).collect())
    }

    /// Where `bytes` bytes at an address are.
    pub(super) fn place(&self, address: u64, bytes: usize) -> Result<Place, Trouble> {
        let (number, offset) = ((address >> 32) as usize, (address & 0xffff_ffff) as usize);
        let found = number.checked_sub(1).and_then(|at| Some((at, self.allocations.get(at)?)));
        match found {
            Some((allocation, found)) if offset + bytes <= found.bytes.len() => {
                Ok(Place { allocation, offset })
            }
            Some((allocation, found)) => Err((
                FaultKind::OutOfBounds,
                format!(
                    "{bytes} bytes at {address:#x}, which is byte {offset} of the {} of allocation {allocation}",
                    found.bytes.len()
                ),
            )),
            None => Err((
                FaultKind::OutOfBounds,
                format!("{bytes} bytes at {address:#x}, where no memory is mapped"),
            )),
        }
    }

    /// Bytes, which must have been written.
    #[inline]
    pub(super) fn read_bytes(&self, place: Place, bytes: usize) -> Result<&[u8], Trouble> {
        let found = &self.allocations[place.allocation];
        if let Some(at) = first_unwritten(&found.written, place.offset, bytes) {
            let address = ((place.allocation as u64 + 1) << 32) + at as u64;
            return Err((
                FaultKind::Uninitialized,
                format!("global memory at {address:#x} was never written"),
            ));
        }
        Ok(&found.bytes[place.offset..place.offset + bytes])
    }

    pub(super) fn write_bytes(&mut self, place: Place, bytes: &[u8]) {
        let found = &mut self.allocations[place.allocation];
        found.bytes[place.offset..place.offset + bytes.len()].copy_from_slice(bytes);
        set_written(&mut found.written, place.offset, bytes.len());
    }

    /// Up to 16 bytes, and which of them were written.
    pub(super) fn peek(&self, place: Place, bytes: usize) -> ([u8; 16], u16) {
        let found = &self.allocations[place.allocation];
        peek(&found.bytes, &found.written, place.offset, bytes)
    }

    /// Puts back what [`Memory::peek`] gave.
    pub(super) fn poke(&mut self, place: Place, bytes: usize, from: &([u8; 16], u16)) {
        let found = &mut self.allocations[place.allocation];
        poke(&mut found.bytes, &mut found.written, (place.offset, bytes), from);
    }

    /// The size of each allocation.
    pub(super) fn sizes(&self) -> impl Iterator<Item = usize> {
        self.allocations.iter().map(|allocation| allocation.bytes.len())
    }
}

/// The words of a map of one bit a byte that tell of some bytes: place, and bits.
fn words(offset: usize, bytes: usize) -> impl Iterator<Item = (usize, u64)> {
    let end = offset + bytes;
    (offset / 64..end.div_ceil(64)).map(move |word| {
        let (from, to) = (offset.max(64 * word) % 64, end.min(64 * word + 64) - 64 * word);
        (word, (!0 << from) & (!0 >> (64 - to)))
    })
}

/// The first of some bytes that nobody wrote.
pub(super) fn first_unwritten(written: &[u64], offset: usize, bytes: usize) -> Option<usize> {
    let (word, missing) = words(offset, bytes)
        .map(|(word, bits)| (word, bits & !written[word]))
        .find(|(_, missing)| *missing != 0)?;
    Some(64 * word + missing.trailing_zeros() as usize)
}

/// Says that some bytes were written.
pub(super) fn set_written(written: &mut [u64], offset: usize, bytes: usize) {
    words(offset, bytes).for_each(|(word, bits)| written[word] |= bits);
}

/// Up to 16 bytes, and which of them were written.
pub(super) fn peek(bytes: &[u8], written: &[u64], offset: usize, count: usize) -> ([u8; 16], u16) {
    let mut out = [0; 16];
    out[..count].copy_from_slice(&bytes[offset..offset + count]);
    let bit = |at: usize| (written[(offset + at) / 64] >> ((offset + at) % 64) & 1) as u16;
    (out, (0..count).fold(0, |known, at| known | bit(at) << at))
}

/// Puts back what [`peek`] gave: bytes that nobody wrote are again such.
pub(super) fn poke(
    bytes: &mut [u8],
    written: &mut [u64],
    (offset, count): (usize, usize),
    from: &([u8; 16], u16),
) {
    bytes[offset..offset + count].copy_from_slice(&from.0[..count]);
    for at in 0..count {
        let (word, bit) = (&mut written[(offset + at) / 64], 1 << ((offset + at) % 64));
        *word = if from.1 >> at & 1 != 0 { *word | bit } else { *word & !bit };
    }
}
