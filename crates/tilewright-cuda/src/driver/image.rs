//! Bounds check of ELF images: the driver gets the start of an image but not its length.

/// Checks that an ELF file is for a GPU and that all headers, segments and sections are within it.
///
/// (ELF-64, "ELF Header", "Section Header", "Program Header"; `EM_CUDA` is 190.)
pub(super) fn check(image: &[u8]) -> Result<(), String> {
    let number = |at: u64, bytes: u64| -> Option<u64> {
        let at = usize::try_from(at).ok()?;
        let field = image.get(at..at.checked_add(bytes as usize)?)?;
        Some(field.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    };
    let cut = || format!("it ends after {} bytes, within its headers", image.len());
    if image.get(..6) != Some(b"\x7fELF\x02\x01") {
        return Err("it is no ELF file of 64 bits".into());
    }
    let machine = number(18, 2).ok_or_else(cut)?;
    if machine != 190 {
        return Err(format!("it is for machine {machine}; GPUs are 190"));
    }
    // (offset of the table, bytes per entry, number of entries; offset and size fields within an entry)
    let segments = (number(32, 8), number(54, 2), number(56, 2), [8, 32]);
    let sections = (number(40, 8), number(58, 2), number(60, 2), [24, 32]);
    for (begin, bytes, count, [offset, size]) in [segments, sections] {
        let (begin, bytes, count) = (begin.ok_or_else(cut)?, bytes.ok_or_else(cut)?, count.ok_or_else(cut)?);
        if begin.saturating_add(bytes * count) > image.len() as u64 {
            return Err(cut());
        }
        for at in (0..count).map(|i| begin.saturating_add(i * bytes)) {
            // a NOBITS section has an offset but no bytes in the file
            let empty = offset == 24 && number(at.saturating_add(4), 4) == Some(8);
            let start = number(at.saturating_add(offset), 8).ok_or_else(cut)?;
            let len = number(at.saturating_add(size), 8).ok_or_else(cut)?;
            if !empty && start.saturating_add(len) > image.len() as u64 {
                return Err(format!(
                    "it ends after {} bytes, and a part of it at {}",
                    image.len(),
                    start.saturating_add(len)
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check;

    /// An ELF file with one section of 16 bytes after its header.
    fn image() -> Vec<u8> {
        let mut image = vec![0; 64 + 16 + 64];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        image[18] = 190;
        image[40] = 80;
        image[58] = 64;
        image[60] = 1;
        image[80 + 24] = 64;
        image[80 + 32] = 16;
        image
    }

    #[test]
    fn truncated_or_foreign_images_are_rejected() {
        assert_eq!(check(&image()), Ok(()));
        for len in 0..image().len() {
            assert!(check(&image()[..len]).is_err(), "{len} bytes");
        }
        let mut larger = image();
        larger[80 + 33] = 1;
        assert_eq!(check(&larger), Err("it ends after 144 bytes, and a part of it at 336".into()));
        let mut foreign = image();
        foreign[18] = 62;
        assert_eq!(check(&foreign), Err("it is for machine 62; GPUs are 190".into()));
        assert_eq!(check(b".version 8.0"), Err("it is no ELF file of 64 bits".into()));
    }
}
