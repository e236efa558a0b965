//! The file format of a kernel's machine code: header, names, code.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `TILEWRKC` |
//! | 4 | version of this format |
//! | 32 | BLAKE3 of all that follows |
//! | 32 | the key under which it was written |
//! | 3 × (4 + length) | kernel, target and assembler: length, then UTF-8 |
//! | the rest | the code |
//!
//! Integers are little-endian. Any other file is [`Damage`]; its content is used only after the checksum matches.

use super::key::KernelKey;

const MAGIC: &[u8; 8] = b"TILEWRKC";
const FORMAT: u32 = 1;

/// Machine code of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Code {
    /// The kernel's name.
    pub kernel: String,
    /// The target, such as `sm_90a`.
    pub target: String,
    /// The identity of the assembler.
    pub assembler: String,
    /// The code in the assembler's format: a cubin.
    pub cubin: Vec<u8>,
}

/// The reason why a file is not the expected entry.
pub(super) type Damage = &'static str;

/// Encodes `code` under `key`.
pub(super) fn encode(key: KernelKey, code: &Code) -> Vec<u8> {
    let mut body = Vec::with_capacity(code.cubin.len() + 512);
    body.extend_from_slice(key.bytes());
    for text in [&code.kernel, &code.target, &code.assembler] {
        body.extend_from_slice(&(text.len() as u32).to_le_bytes());
        body.extend_from_slice(text.as_bytes());
    }
    body.extend_from_slice(&code.cubin);
    let checksum = blake3::hash(&body);
    [MAGIC.as_slice(), &FORMAT.to_le_bytes(), checksum.as_bytes(), &body].concat()
}

/// Decodes a file that must have been written under `key`.
pub(super) fn decode(key: KernelKey, file: &[u8]) -> Result<Code, Damage> {
    let rest = file.strip_prefix(MAGIC).ok_or("it is no kernel of ours")?;
    let (format, rest) = rest.split_first_chunk().ok_or("it is cut off")?;
    if u32::from_le_bytes(*format) != FORMAT {
        return Err("it has another version's format");
    }
    let (checksum, body) = rest.split_first_chunk::<32>().ok_or("it is cut off")?;
    if blake3::hash(body) != *checksum {
        return Err("its checksum is wrong");
    }
    let (stated, mut rest) = body.split_first_chunk::<{ KernelKey::BYTES }>().ok_or("it is cut off")?;
    if stated != key.bytes() {
        return Err("it is another kernel's");
    }
    let [kernel, target, assembler] = [text(&mut rest)?, text(&mut rest)?, text(&mut rest)?];
    Ok(Code { kernel, target, assembler, cubin: rest.to_vec() })
}

/// Splits a length-prefixed text off the front of `rest`.
fn text(rest: &mut &[u8]) -> Result<String, Damage> {
    const CUT: Damage = "its names are cut off";
    let (len, after) = rest.split_first_chunk().ok_or(CUT)?;
    let (text, after) = after.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or(CUT)?;
    *rest = after;
    String::from_utf8(text.to_vec()).map_err(|_| "its names are no text")
}

#[cfg(test)]
mod tests {
    use super::{Code, decode, encode};
    use crate::cache::{KernelKey, Source};

    fn sample() -> (KernelKey, Code) {
        let key = Source::new("k", "sm_80", "ret;").key();
        let [kernel, target, assembler] = ["k", "sm_80", "driver 580"].map(str::to_owned);
        (key, Code { kernel, target, assembler, cubin: (0..200).collect() })
    }

    #[test]
    fn an_entry_survives_a_round_trip() {
        let (key, code) = sample();
        assert_eq!(decode(key, &encode(key, &code)), Ok(code));
    }

    #[test]
    fn any_changed_bit_or_length_is_detected() {
        let (key, code) = sample();
        let file = encode(key, &code);
        for len in 0..file.len() {
            assert!(decode(key, &file[..len]).is_err(), "cut to {len}");
        }
        assert!(decode(key, &[&file[..], &[0]].concat()).is_err(), "a byte too many");
        for bit in 0..file.len() * 8 {
            let mut altered = file.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(key, &altered).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn another_kernels_entry_is_rejected() {
        let (key, code) = sample();
        let other = Source::new("k", "sm_86", "ret;").key();
        assert_eq!(decode(key, &encode(other, &code)), Err("it is another kernel's"));
    }

    #[test]
    fn wrong_lengths_are_detected_despite_a_valid_checksum() {
        let key = sample().0;
        for names in [&[255, 255, 255, 255][..], &[1, 0, 0, 0, 0xFF], &[1, 0]] {
            let body = [&key.bytes()[..], names].concat();
            let checksum = blake3::hash(&body);
            let file = [&b"TILEWRKC"[..], &1_u32.to_le_bytes(), checksum.as_bytes(), &body].concat();
            assert!(decode(key, &file).unwrap_err().starts_with("its names are "));
        }
    }
}
