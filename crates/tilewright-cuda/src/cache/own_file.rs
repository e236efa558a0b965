//! The program or library that contains this code, beside which a bundle is searched.

use std::{ops::Range, path::PathBuf, sync::OnceLock};

/// The folder of the file, which is read once.
pub(super) fn folder() -> Option<PathBuf> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOLDER.get_or_init(|| Some(file()?.parent()?.to_owned())).clone()
}

/// The mapped file that contains this function. Without a list of mapped files, as on other systems than Linux, the program.
fn file() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    file_at(&maps, file as fn() -> Option<PathBuf> as usize).or_else(|| std::env::current_exe().ok())
}

/// The file that is mapped at an address. (proc_pid_maps(5): `begin-end permissions offset device inode path`)
fn file_at(maps: &str, address: usize) -> Option<PathBuf> {
    let range = |line: &str| -> Option<Range<usize>> {
        let (begin, end) = line.split_once(' ')?.0.split_once('-')?;
        Some(usize::from_str_radix(begin, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
    };
    let line = maps.lines().find(|line| range(line).is_some_and(|range| range.contains(&address)))?;
    // only the path has a slash
    Some(PathBuf::from(&line[line.find('/')?..]))
}

#[cfg(test)]
mod tests {
    use super::{file, file_at};
    use std::path::Path;

    #[test]
    fn this_code_is_in_the_program_of_the_tests() {
        assert_eq!(file(), std::env::current_exe().ok());
    }

    #[test]
    fn a_file_is_found_by_an_address_of_its_mapping() {
        let maps = "1000-2000 r--p 00000000 08:01 7    /lib/a b/_core.so\n\
                    2000-3000 r-xp 00001000 08:01 7    /lib/a b/_core.so\n\
                    5000-6000 rw-p 00000000 00:00 0    [heap]\n6000-7000 rw-p 00000000 00:00 0 \n";
        let at = |address| file_at(maps, address);
        assert_eq!(at(0x2fff).as_deref(), Some(Path::new("/lib/a b/_core.so")));
        assert_eq!([0xfff, 0x3000, 0x5000, 0x6000].map(at), [const { None }; 4]);
        assert_eq!(file_at("", 0x2000), None);
    }
}
