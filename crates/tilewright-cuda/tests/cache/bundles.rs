//! Bundles.

use crate::{Fake, Refusal, files, keep_warning, kernel, machine_code, warnings_about};
use std::{fs, path::Path};
use tilewright_cuda::cache::{BundleContent, Cache, Code, Counts, Settings, Source, make_bundle};

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

/// Rejects code of ptxas, as a driver that is too old for it.
fn load(code: &Code) -> Result<String, Refusal> {
    match code.assembler.as_str() {
        "ptxas" => Err(Refusal("CUDA_ERROR_NO_BINARY_FOR_GPU".to_owned())),
        other => Ok(other.to_owned()),
    }
}

#[test]
fn the_cache_serves_kernels_of_a_bundle_that_the_driver_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let [path, cached] = ["b", "cached"].map(|name| folder.path().join(name));
    bundle(&path, &[kernel(10)]);
    // an optional bundle: nothing is printed
    let open = || Cache::open(crate::quiet(&cached).optional_bundle(&path)).unwrap();
    let first = open();
    let fake = Fake::new("driver 525");
    assert_eq!(first.load(&kernel(10), &fake, load, |_| true).unwrap(), "driver 525");
    assert_eq!(first.counts(), Counts { bundled: 1, assembled: 1, invalid: 1, ..Counts::default() });
    let text =
        "kernel kernel_10 of a bundle is not used: the device refused it: CUDA_ERROR_NO_BINARY_FOR_GPU";
    assert_eq!(first.bundle_refusal(), Some(text));
    let second = open();
    assert_eq!(second.load(&kernel(10), &fake, load, |_| true).unwrap(), "driver 525");
    assert_eq!(second.counts(), Counts { bundled: 1, cached: 1, invalid: 1, ..Counts::default() });
    assert_eq!(fake.calls(), 1, "it was assembled once");
}

#[test]
fn an_optional_bundle_may_be_missing_or_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("b");
    let fake = Fake::new("driver 580");
    let open = || Cache::open(Settings::off().optional_bundle(&path).warn(|text| panic!("{text}"))).unwrap();
    let missing = open();
    assert_eq!(missing.bundles().count(), 0);
    missing.code(&kernel(11), &fake).unwrap();
    assert_eq!((missing.counts().assembled, missing.bundle_refusal()), (1, None));
    bundle(&path, &[kernel(11)]);
    open().code(&kernel(11), &fake).unwrap();
    assert_eq!(fake.calls(), 1);
    fs::write(path.join(&files(&path)[0]), "damaged").unwrap();
    let damaged = open();
    assert_eq!(damaged.code(&kernel(11), &fake).unwrap().assembler, "driver 580");
    assert!(damaged.bundle_refusal().unwrap().ends_with("it is no kernel of ours"));
    let content = BundleContent::read(&path).unwrap();
    assert_eq!((content.kernels, content.damaged), (0, 1));
}

#[test]
fn an_entry_of_another_kernel_or_text_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("b");
    bundle(&path, &[kernel(12)]);
    // the same name and target with another text, as of another version
    let newer = Source::new("kernel_12", "sm_90a", ".target sm_90a\n add 13;\n ret;\n");
    // the file of the old text under the key of the new one
    fs::copy(path.join(&files(&path)[0]), path.join(format!("{}.kernel", newer.key()))).unwrap();
    let cache = Cache::open(Settings::off().optional_bundle(&path)).unwrap();
    let fake = Fake::new("driver 580");
    assert_eq!(cache.code(&newer, &fake).unwrap().cubin, machine_code("driver 580", &newer));
    assert!(cache.bundle_refusal().unwrap().ends_with("it is another kernel's"));
    assert_eq!(cache.code(&kernel(12), &fake).unwrap().assembler, "ptxas");
    let content = BundleContent::read(&path).unwrap();
    assert_eq!((content.kernels, content.damaged, content.samples.len()), (1, 1, 1));
    assert_eq!(content.targets.into_iter().collect::<Vec<_>>(), ["sm_90a"]);
}

#[test]
fn bundles_have_no_lines_of_the_source() {
    let folder = tempfile::tempdir().unwrap();
    let text = ".target sm_80\n    .loc 1 5 3\n    ret;\n.file 1 \"a.rs\"\n";
    let source = Source::new("kernel_13", "sm_80", text);
    bundle(folder.path(), std::slice::from_ref(&source));
    let cache = Cache::open(Settings::off().bundle(folder.path()).refuse_to_assemble()).unwrap();
    let code = cache.code(&source, &Fake::new("driver 580")).unwrap();
    assert_eq!(code.cubin, machine_code("ptxas", &source.without_source_lines()));
}

#[test]
fn code_of_a_bundle_that_the_driver_is_too_old_for_is_assembled() {
    let folder = tempfile::tempdir().unwrap();
    bundle(folder.path(), &[kernel(9)]);
    let cache = Cache::open(Settings::off().bundle(folder.path()).warn(keep_warning)).unwrap();
    let loaded = cache.load(&kernel(9), &Fake::new("driver 525"), load, |_| true);
    assert_eq!(loaded.unwrap(), "driver 525");
    let text = "kernel kernel_9 of a bundle is not used: the device refused it: CUDA_ERROR_NO_BINARY_FOR_GPU";
    assert_eq!(warnings_about(text), 1);
}
