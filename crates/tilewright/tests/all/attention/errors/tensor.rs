//! Errors of `View` and `ViewMut`.

use super::refused;
use tilewright::{Error, View, ViewMut};

const MAX: usize = usize::MAX;

#[test]
fn shapes_that_do_not_fit_the_data() {
    let data = vec![0.0_f32; 6];
    refused(View::new(&data, &[2, 4]), "tensor.new: shape [2, 4] needs 8 elements, the data has 6");
    refused(View::new(&data, &[]), "tensor.new: shape [] needs 1 elements, the data has 6");
    refused(
        View::new(&data, &[1, 2, 3, 1, 1]),
        "tensor.new: shape [1, 2, 3, 1, 1] has 5 axes, the most is 4",
    );
    refused(
        View::new(&data, &[MAX, 2]),
        "tensor.new: shape [18446744073709551615, 2] needs more than 2^64 elements, the data has 6",
    );
    let mut data = data;
    refused(ViewMut::new(&mut data, &[7]), "tensor.new: shape [7] needs 7 elements, the data has 6");
}

#[test]
fn strides_that_leave_the_data() {
    let data = vec![0.0_f32; 6];
    refused(
        View::strided(&data, &[2, 3], &[3]),
        "tensor.strided: shape [2, 3] has 2 axes, strides [3] have 1",
    );
    refused(
        View::strided(&data, &[2, 3], &[4, 1]),
        "tensor.strided: shape [2, 3] with strides [4, 1] reaches beyond the 6 elements of the data",
    );
    refused(
        View::strided(&data, &[1, 1, 1, 1, 1], &[1; 5]),
        "tensor.strided: shape [1, 1, 1, 1, 1] has 5 axes, the most is 4",
    );
    for strides in [[MAX, 1], [MAX / 2, MAX], [1 << 63, 1 << 63]] {
        let text = format!(
            "tensor.strided: shape [3, 3] with strides {strides:?} reaches beyond the 6 elements of the data"
        );
        refused(View::strided(&data, &[3, 3], &strides), &text);
    }
    refused(
        View::strided(&data[..0], &[1], &[1]),
        "tensor.strided: shape [1] with strides [1] reaches beyond the 0 elements of the data",
    );
}

#[test]
fn aliasing_outputs() {
    let mut data = vec![0.0_f32; 9];
    for strides in [[0, 1], [1, 1], [2, 1], [1, 2]] {
        let text = format!(
            "tensor.strided: shape [3, 3] with strides {strides:?} names one element twice, which an output must not"
        );
        refused(ViewMut::strided(&mut data, &[3, 3], &strides), &text);
    }
    assert!(ViewMut::strided(&mut data, &[3, 3], &[1, 3]).is_ok(), "a transposed output is fine");
    assert!(View::strided(&data, &[3, 3], &[0, 1]).is_ok(), "an input may repeat a row");
}

#[test]
fn empty_and_huge_extents_do_not_overflow() {
    let mut data = vec![0.0_f32; 2];
    for shape in [[0, MAX, MAX], [MAX, MAX, 0], [MAX, 0, MAX]] {
        let view = View::new(&data[..0], &shape).expect("no element is needed");
        assert!(view.is_contiguous());
        for strides in [[MAX, MAX, MAX], [0, 0, 0], [1, MAX, 5]] {
            let view = View::strided(&data, &shape, &strides).expect("no element is named");
            assert_eq!(view.shape(), shape);
            let _ = view.is_contiguous();
            let view = ViewMut::strided(&mut data, &shape, &strides).expect("no element is named");
            let _ = view.is_contiguous();
        }
    }
    let repeated = View::strided(&data, &[MAX, MAX], &[0, 0]).expect("one element, again and again");
    assert!(!repeated.is_contiguous());
    let single = ViewMut::strided(&mut data, &[1, 2], &[MAX, 1]).expect("a stride that is never taken");
    assert!(single.is_contiguous());
}

#[test]
fn an_error_names_its_operator() {
    let error = View::new(&vec![0.0_f32; 2], &[3]).expect_err("two elements are not three");
    assert_eq!(error.operator(), "tensor.new");
    assert_eq!(error.message(), "shape [3] needs 3 elements, the data has 2");
    assert_eq!(Error::new("a.b", "c").to_string(), "a.b: c");
}
