//! Bundles.

use crate::{Fake, Refusal, files, keep_warning, kernel, machine_code, warnings_about};
use std::{fs, path::Path};
use tilewright_cuda::cache::{Cache, Code, Counts, Settings, Source, make_bundle};

fn bundle(path: &Path, kernels: &[Source]) {
    let bytes = make_bundle(path, kernels, &Fake::new("ptxas"), 2, &|_| {}).unwrap();
    assert_eq!(bytes, 200_000 * kernels.len() as u64);
}

#[test]
fn bundles_precede_the_cache_for_every_driver() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second, cached] = ["first", "second", "cached"].map(|name| folder.path().join(name));
    bundle(&first, &[kernel(1)]);
    bundle(&second, &[kernel(1), kernel(2)]);
    let fake = Fake::new("driver 580");
    crate::open(&cached).all(&[kernel(2), kernel(3)], &fake, &|_| {}).unwrap();
    let settings = crate::quiet(&cached).bundle(&first).bundle(&second).refuse_to_assemble();
    let cache = Cache::open(settings.clone()).unwrap();
    let made_by = |number| cache.code(&kernel(number), &fake).unwrap().assembler.clone();
    assert_eq!([1, 2, 3].map(made_by), ["ptxas", "ptxas", "driver 580"]);
    assert_eq!(cache.counts(), Counts { bundled: 2, cached: 1, ..Counts::default() });
    fs::remove_dir_all(&first).unwrap();
    let why = Cache::open(settings).unwrap_err().to_string();
    assert_eq!(why, format!("kernels: {}: it is no bundle: there is no such folder", first.display()));
}

#[test]
fn a_bundle_is_made_in_a_folder_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let why = Cache::open(Settings::off().bundle(path)).unwrap_err().to_string();
    assert!(why.ends_with("it is no bundle: there is no kernel in it"), "{why}");
    fs::write(path.join("README"), "").unwrap();
    let make = |path: &Path| make_bundle(path, &[kernel(1)], &Fake::new("ptxas"), 2, &|_| {});
    let why = make(path).unwrap_err().to_string();
    assert_eq!(
        why,
        format!("kernels: {}: it is not empty; a bundle is made in a folder of its own", path.display())
    );
    let wrong = [kernel(1), Source::new("wrong", "sm_80", "mistake")];
    let why = make_bundle(&path.join("b"), &wrong, &Fake::new("ptxas"), 1, &|_| {}).unwrap_err();
    assert!(why.to_string().starts_with("kernel wrong for sm_80: the assembler refused it: "), "{why}");
}

#[test]
fn a_damaged_bundle_warns_and_is_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    bundle(&folder.path().join("b"), &[kernel(7), kernel(8)]);
    let path = folder.path().join("b");
    for name in files(&path) {
        fs::write(path.join(name), "damaged").unwrap();
    }
    let fake = Fake::new("driver 580");
    let settings = Settings::off().bundle(&path).warn(keep_warning);
    let cache = Cache::open(settings.clone()).unwrap();
    for number in [7, 8] {
        let code = cache.code(&kernel(number), &fake).unwrap();
        assert_eq!(code.cubin, machine_code("driver 580", &kernel(number)));
    }
    assert_eq!(cache.counts(), Counts { assembled: 2, invalid: 2, ..Counts::default() });
    assert_eq!(warnings_about("kernel kernel_7 of a bundle is not used: it is no kernel of ours"), 1);
    assert_eq!(warnings_about("kernel kernel_8 of a bundle"), 0, "once is enough");
    assert_eq!(files(&path).len(), 2);
    let why = Cache::open(settings.refuse_to_assemble()).unwrap().code(&kernel(7), &fake).unwrap_err();
    assert!(why.to_string().ends_with("b (it is no kernel of ours)"), "{why}");
}

#[test]
fn code_of_a_bundle_that_the_driver_is_too_old_for_is_assembled() {
    let folder = tempfile::tempdir().unwrap();
    bundle(folder.path(), &[kernel(9)]);
    let cache = Cache::open(Settings::off().bundle(folder.path()).warn(keep_warning)).unwrap();
    let load = |code: &Code| match code.assembler.as_str() {
        "ptxas" => Err(Refusal("CUDA_ERROR_NO_BINARY_FOR_GPU".to_owned())),
        other => Ok(other.to_owned()),
    };
    let loaded = cache.load(&kernel(9), &Fake::new("driver 525"), load, |_| true);
    assert_eq!(loaded.unwrap(), "driver 525");
    let text = "kernel kernel_9 of a bundle is not used: the device refused it: CUDA_ERROR_NO_BINARY_FOR_GPU";
    assert_eq!(warnings_about(text), 1);
}
