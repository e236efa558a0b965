//! Measurements of an assembled kernel: resources, instruction counts, overlap; and the checks of every kernel.

use super::{
    assemble::Assembler,
    module::Source,
    overlap::{MIN_SHARE, Overlap},
    report::Report,
    sass::{Code, Inst},
};

/// The measurements of a kernel for one architecture.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    pub(crate) kernel: String,
    pub(crate) arch: u32,
    pub(crate) report: Report,
    /// Shared memory per CTA in bytes, static and dynamic.
    pub(crate) shared: u64,
    pub(crate) code: Code,
    /// Whether it must overlap softmax with an MMA.
    pub(crate) promises: bool,
    pub(crate) overlap: Option<Overlap>,
}

impl Measured {
    /// Assembles the PTX of a kernel.
    pub(crate) fn of(assembler: &Assembler, source: &Source) -> Result<Self, String> {
        let cubin = assembler.assemble(&source.text)?;
        Self::parse(source, &cubin.report, &assembler.disassemble(&cubin)?)
    }

    /// Parses the report of ptxas, and the disassembly.
    pub(crate) fn parse(source: &Source, report: &str, code: &str) -> Result<Self, String> {
        let &Source { arch, promises, .. } = source;
        let report = Report::parse(report)
            .ok_or_else(|| format!("the report of ptxas has no resources: {}", report.trim()))?;
        let code = Code::parse(code);
        let shared = source.shared + report.shared;
        let overlap = promises.then(|| Overlap::of(&code)).flatten();
        Ok(Self { kernel: source.kernel.clone(), arch, report, shared, code, promises, overlap })
    }

    /// The number of instructions of a kind.
    pub(crate) fn count(&self, kind: &str) -> u64 {
        self.code.count(kind)
    }

    /// Violations of the rules for all kernels, one line each.
    pub(crate) fn violations(&self) -> Vec<String> {
        let mut lines = self.report.losses.clone();
        for (number, what) in [
            (self.report.spill_stores, "bytes of spill stores"),
            (self.report.spill_loads, "bytes of spill loads"),
            (self.count("STL"), "STL (stores to local memory)"),
            (self.count("LDL"), "LDL (loads from local memory)"),
        ] {
            if number > 0 {
                lines.push(format!("{number} {what}, expected none"));
            }
        }
        let in_uniform = |inst: &&Inst| inst.kind() == "LDGSTS" && inst.operands.contains("+UR");
        let copies = self.code.insts.iter().filter(in_uniform).count();
        if copies > 0 {
            // ptxas 13.0 confuses it with the register of the cache policy, which an H100 reports as an illegal instruction
            lines.push(format!("{copies} LDGSTS with a uniform register in the address, expected none"));
        }
        if self.code.insts.is_empty() {
            lines.push("the disassembly has no instructions".to_owned());
        }
        match self.overlap {
            None if self.promises => lines.push("promises overlap, but has no loop of MMAs and maxima".to_owned()),
            Some(Overlap { between, all }) if self.overlap.is_some_and(|o| o.share() < MIN_SHARE) => lines.push(format!(
                "{between} of {all} row maxima of the main loop are between the waits, expected at least {:.0} %",
                MIN_SHARE * 100.0
            )),
            _ => {}
        }
        lines
    }
}

pub(crate) fn table(all: &[Measured]) -> String {
    const KINDS: [&str; 7] = ["HGMMA", "QGMMA", "HMMA", "LDGSTS", "UTMALDG", "MUFU", "R2UR"];
    let width = all.iter().map(|m| m.kernel.len()).max().unwrap_or(0).max("kernel".len());
    let cells = |first: &str, cells: &[String]| {
        let cells: String = cells.iter().map(|cell| format!(" {cell:>9}")).collect();
        format!("{first:width$}{cells}").trim_end().to_owned() + "\n"
    };
    let mut heads = vec!["arch", "registers", "barriers", "shared", "spills"];
    heads.extend(KINDS);
    heads.extend(["overlap", "remarks"]);
    let heads: Vec<String> = heads.into_iter().map(str::to_lowercase).collect();
    let mut text = cells("kernel", &heads);
    for m in all {
        let report = &m.report;
        let spills = report.spill_stores + report.spill_loads;
        let mut row = vec![format!("sm_{}", m.arch)];
        row.extend([report.registers, report.barriers, m.shared, spills].map(|n| n.to_string()));
        row.extend(KINDS.map(|kind| m.count(kind).to_string()));
        row.push(m.overlap.map_or("-".to_owned(), |overlap| format!("{:.0} %", overlap.share() * 100.0)));
        row.push((report.notes.len() + report.losses.len()).to_string());
        text += &cells(&m.kernel, &row);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{Measured, Overlap, table};
    use crate::gate::{report::Report, sass::Code};

    fn sound() -> Measured {
        Measured {
            kernel: "k".to_owned(),
            arch: 90,
            report: Report { registers: 168, ..Report::default() },
            shared: 1024,
            code: Code::parse("/*0000*/ HGMMA R24 ;\n/*0010*/ R2UR UR4, R1 ;\n"),
            promises: true,
            overlap: Some(Overlap { between: 19, all: 20 }),
        }
    }

    #[test]
    fn violations_are_reported() {
        assert!(sound().violations().is_empty());
        let spilled = |spill_stores, spill_loads| Report { spill_stores, spill_loads, ..Report::default() };
        let lost = Report { losses: vec!["(C7512)".to_owned()], ..Report::default() };
        let local =
            Code::parse("/*0000*/ STL [R1], R2 ;\n/*0010*/ LDL R2, [R1] ;\n/*0020*/ LDL R2, [R1] ;\n");
        for (bad, lines) in [
            (Measured { report: spilled(8, 0), ..sound() }, &["8 bytes of spill stores, expected none"][..]),
            (Measured { report: spilled(0, 4), ..sound() }, &["4 bytes of spill loads, expected none"]),
            (Measured { report: lost, ..sound() }, &["(C7512)"]),
            (
                Measured { code: local, ..sound() },
                &[
                    "1 STL (stores to local memory), expected none",
                    "2 LDL (loads from local memory), expected none",
                ],
            ),
            (
                Measured {
                    code: Code::parse("/*0000*/ LDGSTS.E [R65+UR0+0x2320], desc[UR1][R48.64] ;\n"),
                    ..sound()
                },
                &["1 LDGSTS with a uniform register in the address, expected none"],
            ),
            (Measured { code: Code::default(), ..sound() }, &["the disassembly has no instructions"]),
            (
                Measured { overlap: Some(Overlap { between: 18, all: 20 }), ..sound() },
                &["18 of 20 row maxima of the main loop are between the waits, expected at least 95 %"],
            ),
            (
                Measured { overlap: None, ..sound() },
                &["promises overlap, but has no loop of MMAs and maxima"],
            ),
        ] {
            assert_eq!(bad.violations(), lines);
        }
        assert!(Measured { overlap: None, promises: false, ..sound() }.violations().is_empty());
    }

    #[test]
    fn a_table_row_holds_the_measurements() {
        let text = table(&[sound()]);
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0].len(), rows[1].len() - 1, "95 % is two words");
        assert_eq!(
            rows[1],
            ["k", "sm_90", "168", "0", "1024", "0", "1", "0", "0", "0", "0", "0", "1", "95", "%", "0"]
        );
    }
}
