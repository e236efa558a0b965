//! A kernel's machine code as one file: a header, the names, the code.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `TILEWRKC` |
//! | 4 | version of this format |
//! | 32 | BLAKE3 of all that follows |
//! | 32 | the key under which it was written |
//! | 3 × (4, then so many) | kernel, target and assembler, in UTF-8 |
//! | the rest | the code |
//!
//! Numbers are little endian. A file that is not exactly this is [`Damage`]; none of its bytes are trusted before the checksum is.

use super::source::Key;

const MAGIC: &[u8; 8] = b"TILEWRKC";
const FORMAT: u32 = 1;

/// Machine code of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Code {
    /// The kernel's name.
    pub kernel: String,
    /// What it was assembled for, such as `sm_90a`.
    pub target: String,
    /// What assembled it.
    pub assembler: String,
    /// The code, as the assembler wrote it: a cubin.
    pub cubin: Vec<u8>,
}

/// Why a file is no entry, or not the one that was looked for.
pub(super) type Damage = &'static str;

/// The file of `code` under `key`.
pub(super) fn encode(key: Key, code: &Code) -> Vec<u8> {
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

/// The code in a file, which has to be what was written under `key`.
pub(super) fn decode(key: Key, file: &[u8]) -> Result<Code, Damage> {
    let rest = file.strip_prefix(MAGIC).ok_or("it is no kernel of ours")?;
    let (format, rest) = rest.split_first_chunk().ok_or("it is cut off")?;
    if u32::from_le_bytes(*format) != FORMAT {
        return Err("it has another version's format");
    }
    let (checksum, body) = rest.split_first_chunk::<32>().ok_or("it is cut off")?;
    if blake3::hash(body) != *checksum {
        return Err("its checksum is wrong");
    }
    let (stated, mut rest) = body.split_first_chunk::<{ Key::BYTES }>().ok_or("it is cut off")?;
    if stated != key.bytes() {
        return Err("it is another kernel's");
    }
    let [kernel, target, assembler] = [text(&mut rest)?, text(&mut rest)?, text(&mut rest)?];
    Ok(Code { kernel, target, assembler, cubin: rest.to_vec() })
}

/// Takes a text, with its length before it, from the beginning of `rest`.
fn text(rest: &mut &[u8]) -> Result<String, Damage> {
    const CUT: Damage = "its names are cut off";
    let (len, behind) = rest.split_first_chunk().ok_or(CUT)?;
    let (text, behind) = behind.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or(CUT)?;
    *rest = behind;
    String::from_utf8(text.to_vec()).map_err(|_| "its names are no text")
}

#[cfg(test)]
mod tests {
    use super::{Code, decode, encode};
    use crate::cache::source::{Key, Source};

    fn sample() -> (Key, Code) {
        let key = Source::new("k", "sm_80", "ret;").key();
        let [kernel, target, assembler] = ["k", "sm_80", "driver 580"].map(str::to_owned);
        (key, Code { kernel, target, assembler, cubin: (0..200).collect() })
    }

    #[test]
    fn what_was_written_is_read() {
        let (key, code) = sample();
        assert_eq!(decode(key, &encode(key, &code)), Ok(code));
    }

    #[test]
    fn a_file_that_differs_in_any_bit_or_length_is_none() {
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
    fn another_kernels_file_is_none() {
        let (key, code) = sample();
        let other = Source::new("k", "sm_86", "ret;").key();
        assert_eq!(decode(key, &encode(other, &code)), Err("it is another kernel's"));
    }

    #[test]
    fn lengths_that_lie_are_found_behind_a_right_checksum() {
        let key = sample().0;
        for names in [&[255, 255, 255, 255][..], &[1, 0, 0, 0, 0xFF], &[1, 0]] {
            let body = [&key.bytes()[..], names].concat();
            let checksum = blake3::hash(&body);
            let file = [&b"TILEWRKC"[..], &1_u32.to_le_bytes(), checksum.as_bytes(), &body].concat();
            assert!(decode(key, &file).unwrap_err().starts_with("its names are "));
        }
    }
}
