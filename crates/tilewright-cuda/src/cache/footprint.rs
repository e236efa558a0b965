//! Resource usage of machine code, parsed from the cubin itself without a driver or tool.
//!
//! A cubin is an ELF file. Its section `.nv.info` is a list of attributes: one byte for the format of the value, one for the
//! attribute, then two bytes of value, or a two-byte length and as many bytes. Registers and stack are pairs of a symbol index
//! and a count. Verified against `ptxas -v` (version 13.0; sm_80, sm_90a and sm_120).

/// Format of values with a length.
const SIZED: u8 = 4;
const REGISTERS: u8 = 0x2f;
const STACK: u8 = 0x11;

/// Resource usage of machine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Registers per thread at launch.
    pub registers: u32,
    /// Bytes of stack per thread. Our kernels have no local arrays, so these are spilled registers.
    pub stack_bytes: u32,
    /// Bytes of instructions.
    pub code_bytes: u64,
}

impl Footprint {
    /// The usage of a cubin with one kernel; `None` for other bytes.
    pub fn of(cubin: &[u8]) -> Option<Self> {
        let sections = sections(cubin)?;
        let attributes = sections.iter().find(|section| section.name == ".nv.info")?;
        let code = sections.iter().filter(|section| section.name.starts_with(".text."));
        Some(Self {
            registers: attribute(attributes.bytes, REGISTERS)?,
            stack_bytes: attribute(attributes.bytes, STACK).unwrap_or(0),
            code_bytes: code.map(|section| section.bytes.len() as u64).sum(),
        })
    }
}

struct Section<'a> {
    name: &'a str,
    bytes: &'a [u8],
}

/// The sections of a 64-bit little-endian ELF file; NOBITS sections are empty.
fn sections(file: &[u8]) -> Option<Vec<Section<'_>>> {
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let table = usize::try_from(number::<8>(file, 0x28)?).ok()?;
    let [size, count, names] = [0x3a, 0x3c, 0x3e].map(|at| number::<2>(file, at));
    let (size, count, names) = (size? as usize, count? as usize, names? as usize);
    let header = |at: usize| file.get(table.checked_add(at.checked_mul(size)?)?..)?.get(..size);
    let bytes = |header: &[u8]| {
        const NO_BITS: u64 = 8;
        if number::<4>(header, 4)? == NO_BITS {
            return Some(&file[..0]);
        }
        let begin = usize::try_from(number::<8>(header, 0x18)?).ok()?;
        let end = begin.checked_add(usize::try_from(number::<8>(header, 0x20)?).ok()?)?;
        file.get(begin..end)
    };
    let names = bytes(header(names)?)?;
    let section = |at: usize| {
        let header = header(at)?;
        let name = names.get(number::<4>(header, 0)? as usize..)?.split(|&byte| byte == 0).next()?;
        Some(Section { name: std::str::from_utf8(name).ok()?, bytes: bytes(header)? })
    };
    (0..count).map(section).collect()
}

/// The maximum over all symbols of a per-symbol attribute.
fn attribute(mut list: &[u8], wanted: u8) -> Option<u32> {
    let mut largest = None;
    while let Some((head, rest)) = list.split_first_chunk::<4>() {
        let [format, what, ..] = *head;
        let len = if format == SIZED { usize::from(u16::from_le_bytes([head[2], head[3]])) } else { 0 };
        let (value, after) = rest.split_at_checked(len)?;
        if format == SIZED && what == wanted {
            largest = largest.max(Some(number::<4>(value, 4)? as u32));
        }
        list = after;
    }
    largest
}

/// The little-endian integer of `BYTES` bytes at an offset.
fn number<const BYTES: usize>(file: &[u8], at: usize) -> Option<u64> {
    let bytes = file.get(at..)?.first_chunk::<BYTES>()?;
    let mut word = [0; 8];
    word[..BYTES].copy_from_slice(bytes);
    Some(u64::from_le_bytes(word))
}

#[cfg(test)]
mod tests {
    use super::Footprint;

    /// A file with the sections that the parser reads, in the layout of an assembler.
    fn cubin() -> Vec<u8> {
        let names = b"\0.nv.info\0.text.k\0.shstrtab\0.nv.shared.k\0";
        let info = [
            &[3, 0x1b, 255, 0][..],                    // two bytes of value
            &[4, 0x2f, 8, 0, 9, 0, 0, 0, 10, 0, 0, 0], // registers of two symbols
            &[4, 0x2f, 8, 0, 8, 0, 0, 0, 168, 0, 0, 0],
            &[4, 0x11, 8, 0, 9, 0, 0, 0, 0, 2, 0, 0],
        ]
        .concat();
        let mut file = vec![0; 64];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let sections = [(27, 3, &names[..]), (1, 1, &info[..]), (10, 1, &[0; 48][..])];
        let mut table = Vec::new();
        for (name, kind, bytes) in sections {
            table.push((name, kind, file.len() as u64, bytes.len() as u64));
            file.extend_from_slice(bytes);
        }
        table.push((27, 8, u64::MAX, 4096)); // without bytes
        let begin = file.len() as u64;
        for (name, kind, at, len) in &table {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&u32::to_le_bytes(*name));
            header[4..8].copy_from_slice(&u32::to_le_bytes(*kind));
            header[0x18..0x20].copy_from_slice(&at.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&len.to_le_bytes());
            file.extend_from_slice(&header);
        }
        file[0x28..0x30].copy_from_slice(&begin.to_le_bytes());
        file[0x3a..0x40].copy_from_slice(&[64, 0, table.len() as u8, 0, 0, 0]);
        file
    }

    #[test]
    fn resources_are_parsed_from_the_code() {
        let expected = Footprint { registers: 168, stack_bytes: 512, code_bytes: 48 };
        assert_eq!(Footprint::of(&cubin()), Some(expected));
    }

    #[test]
    fn other_bytes_have_no_footprint() {
        assert_eq!(Footprint::of(b""), None);
        assert_eq!(Footprint::of(b"\x7fELF and nothing more"), None);
        let whole = cubin();
        for len in 0..whole.len() {
            assert_eq!(Footprint::of(&whole[..len]), None, "cut to {len}");
        }
        for byte in 0..whole.len() {
            for value in [0, 1, 127, 255] {
                let mut altered = whole.clone();
                altered[byte] = value;
                let _ = Footprint::of(&altered); // must not panic
            }
        }
    }
}
