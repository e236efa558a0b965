//! Cache key of a kernel: a hash of all that determines its machine code, without names, versions or times, so entries never become stale.

use std::fmt;
use tilewright_ptx::text::code_lines;

/// Bytes per hasher update: single lines are too short for its SIMD code, and the whole text is not copied.
const PIECE: usize = 16 << 10;

/// A 256-bit hash that identifies a kernel's code.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelKey([u8; Self::BYTES]);

impl KernelKey {
    pub(super) const BYTES: usize = 32;

    /// Skips line information: it determines no instruction, changes with each edit and contains the build folder.
    pub(super) fn of(target: &str, ptx: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("tilewright: PTX and its target, format 1");
        hasher.update(&(target.len() as u64).to_le_bytes()).update(target.as_bytes());
        let mut piece = String::with_capacity(2 * PIECE);
        for line in code_lines(ptx) {
            piece += line;
            if piece.len() >= PIECE {
                hasher.update(piece.as_bytes());
                piece.clear();
            }
        }
        hasher.update(piece.as_bytes());
        Self(hasher.finalize().into())
    }

    /// The key of the code from the assembler `identity`, as the cache uses it: code from a new driver replaces that of the old
    /// one.
    pub(super) fn assembled_by(self, identity: &str) -> Self {
        Self(blake3::keyed_hash(&self.0, identity.as_bytes()).into())
    }

    pub(super) fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// Parses the format that [`Display`](fmt::Display) writes.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let lower = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let hash = blake3::Hash::from_hex(text).ok()?;
        lower.then_some(Self(hash.into()))
    }
}

impl fmt::Display for KernelKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KernelKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelKey({self})")
    }
}
