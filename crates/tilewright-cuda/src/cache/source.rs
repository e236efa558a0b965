//! What is assembled, and the key that it is known by: a hash of everything that decides what the machine code is.
//!
//! Equal keys mean equal code. Neither names, versions nor times of files are part of it, so that no entry can be stale.

use std::fmt;
use tilewright_ptx::{
    ir::Kernel,
    text::{code_lines, ptx},
    verify::Invalid,
};

/// The newest architecture that PTX is printed for; newer devices take its text.
const NEWEST_TEXT: u32 = 120;

/// How many bytes are hashed at once: lines alone are too short for the hasher's vectors, and the whole text is not copied.
const PIECE: usize = 16 << 10;

/// A kernel's PTX, and what it is to be assembled for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    name: String,
    configuration: String,
    target: String,
    ptx: String,
    key: Key,
}

impl Source {
    /// The kernel `name` (that of its PTX entry) for `target`, the device's architecture as assemblers spell it: `sm_90a`.
    ///
    /// The target may be newer than the one that the text names.
    pub fn new(name: impl Into<String>, target: impl Into<String>, ptx: impl Into<String>) -> Self {
        let (name, target, ptx) = (name.into(), target.into(), ptx.into());
        let key = Key::of(&target, &ptx);
        Self { name, configuration: String::new(), target, ptx, key }
    }

    /// A kernel for a device of compute capability `arch`: 90 is `sm_90`, or `sm_90a` for a kernel with instructions of its own.
    ///
    /// # Errors
    /// When the architecture lacks one of its instructions.
    pub fn of(kernel: &Kernel, arch: u32) -> Result<Self, Invalid> {
        let specific = kernel.since().specific;
        let text = ptx(kernel, if specific { arch } else { arch.min(NEWEST_TEXT) })?;
        let suffix = if specific { "a" } else { "" };
        Ok(Self::new(kernel.name.as_str(), format!("sm_{arch}{suffix}"), text))
    }

    /// The same, with words for what the kernel is configured for. Messages show them; they decide nothing.
    #[must_use]
    pub fn configured(mut self, configuration: impl Into<String>) -> Self {
        self.configuration = configuration.into();
        self
    }

    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is configured for, in words; empty where its name says it all.
    pub fn configuration(&self) -> &str {
        &self.configuration
    }

    /// What it is assembled for, such as `sm_90a`.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Its text.
    pub fn ptx(&self) -> &str {
        &self.ptx
    }

    /// Its key, whoever assembles it: that of bundles.
    pub fn key(&self) -> Key {
        self.key
    }
}

/// 256 bits that stand for a kernel's code.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key([u8; Self::BYTES]);

impl Key {
    pub(super) const BYTES: usize = 32;

    /// Lines of the Rust source are left out: they decide no instruction, move with every edit and name the folder of the build.
    fn of(target: &str, ptx: &str) -> Self {
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

    /// The key of what the assembler that calls itself `identity` makes of it: that of the cache, where a new driver's better
    /// code takes the place of the old one's.
    pub(super) fn assembled_by(self, identity: &str) -> Self {
        Self(blake3::keyed_hash(&self.0, identity.as_bytes()).into())
    }

    pub(super) fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// The key that [`Display`](fmt::Display) writes so.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let lower = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let hash = blake3::Hash::from_hex(text).ok()?;
        lower.then_some(Self(hash.into()))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::{Key, Source};

    const TEXT: &str = ".version 7.0\n.target sm_80\n    .loc 1 5 3\n    ret;\n.file 1 \"a.rs\"\n";

    fn key(target: &str, ptx: &str) -> Key {
        Source::new("k", target, ptx).key()
    }

    #[test]
    fn whatever_decides_the_code_decides_the_key() {
        let mine = key("sm_80", TEXT);
        assert_eq!(mine, key("sm_80", TEXT));
        assert_ne!(mine, key("sm_86", TEXT));
        assert_ne!(mine, key("sm_80", &TEXT.replace("ret", "trap")));
        assert_ne!(key("a", "bc"), key("ab", "c"));
        let by = |identity| mine.assembled_by(identity);
        assert_ne!(by("driver 570"), by("driver 580"));
        assert_ne!(by("driver 570"), mine);
        assert_ne!(key("sm_86", TEXT).assembled_by("driver 570"), by("driver 570"));
    }

    #[test]
    fn what_decides_nothing_is_not_in_the_key() {
        let moved = TEXT.replace("1 5 3", "1 6 3").replace("a.rs", "/home/me/a.rs");
        assert_eq!(key("sm_80", TEXT), key("sm_80", &moved));
        let configured = Source::new("k", "sm_80", TEXT).configured("causal");
        assert_eq!(configured.key(), key("sm_80", TEXT));
    }

    #[test]
    fn a_key_is_read_as_it_is_written() {
        let key = key("sm_80", TEXT);
        let text = key.to_string();
        assert_eq!(Key::parse(&text), Some(key));
        assert_eq!(Key::parse(&text.to_uppercase()), None);
        assert_eq!(Key::parse(&text[1..]), None);
        assert_eq!(Key::parse("README"), None);
    }
}
