//! What the ranks sent, and what filled their memory.

use std::collections::BTreeMap;

use crate::metrics::{CollectiveTraffic, Summary};

use super::format::{bytes, escape, grouped, percent};

/// Causes in the order in which a step meets them; unknown ones follow.
const CAUSES: [&str; 7] =
    ["parameters", "gradients", "optimizer", "activations", "communication", "checkpoint", "other"];

/// Peak memory by cause; nothing without a summary.
pub(super) fn memory(summary: Option<&Summary>) -> String {
    let Some(summary) = summary.filter(|summary| !summary.peak_bytes.is_empty()) else {
        return String::new();
    };
    let peak = &summary.peak_bytes;
    let total = peak.get("total").copied();
    let unknown = peak.keys().map(String::as_str).filter(|cause| *cause != "total" && !CAUSES.contains(cause));
    let causes = CAUSES.into_iter().chain(unknown).filter_map(|cause| Some((cause, *peak.get(cause)?)));
    let whole = total.unwrap_or_else(|| causes.clone().map(|(_, size)| size).fold(0, u64::saturating_add));
    let rows: String = causes.map(|(cause, size)| memory_row(cause, size, whole)).collect();
    format!(
        "<section><h2>Memory</h2>\n<div class=\"scroll\"><table><caption>Accounted peaks by cause, over all ranks</caption>\
         <thead><tr><th>Cause</th><th>Bytes</th><th colspan=\"2\">Of the peak</th></tr></thead>\
         <tbody>{rows}</tbody><tfoot>{}</tfoot></table></div></section>\n",
        memory_totals(summary, total)
    )
}

fn memory_row(cause: &str, size: u64, whole: u64) -> String {
    let share = if whole > 0 { size as f64 / whole as f64 } else { 0.0 };
    format!(
        "<tr><th>{}</th><td>{}</td><td>{}</td><td class=\"bar\"><i style=\"width:{:.1}%\"></i></td></tr>",
        escape(cause),
        bytes(size),
        percent(share),
        share.min(1.0) * 100.0
    )
}

fn memory_totals(summary: &Summary, total: Option<u64>) -> String {
    let row = |name: &str, size: u64, remark: &str| {
        format!("<tr><th>{name}</th><td>{}</td><td colspan=\"2\">{remark}</td></tr>", bytes(size))
    };
    let mut rows = total.map_or_else(String::new, |total| row("total", total, ""));
    let totals = summary.peak_bytes_by_rank.iter().filter_map(|peak| peak.get("total"));
    if let Some((rank, &most)) = totals.enumerate().max_by_key(|(_, total)| **total) {
        rows += &row("fullest rank", most, &format!("rank {rank}"));
    }
    let remark = total.map_or_else(String::new, |total| against_accounted(summary.predicted_peak_bytes, total));
    rows += &row("predicted, even rows", summary.predicted_peak_bytes, &remark);
    if let Some(skewed) = summary.predicted_if_skewed() {
        let remark = total.map_or_else(String::new, |total| against_accounted(skewed, total));
        rows += &row("predicted, skewed rows", skewed, &remark);
    }
    if let Some(mib) = summary.peak_rss_mb {
        rows += &row("process", mib.saturating_mul(1 << 20), "resident set, all its ranks");
    }
    rows
}

fn against_accounted(predicted: u64, total: u64) -> String {
    if predicted == total {
        return "equal to the total".to_owned();
    }
    if total == 0 {
        return String::new();
    }
    let difference = (predicted as f64 - total as f64) / total as f64;
    let side = if difference > 0.0 { "above" } else { "below" };
    format!("{} {side} the total", percent(difference.abs()))
}

/// Collectives by kind and by group; nothing without a summary.
pub(super) fn traffic(summary: Option<&Summary>) -> String {
    let Some(summary) = summary else {
        return String::new();
    };
    if summary.traffic.is_empty() && summary.traffic_by_group.is_empty() {
        return "<section><h2>Traffic</h2><p class=\"none\">No collective was issued.</p></section>\n".to_owned();
    }
    let groups: String = summary.traffic_by_group.iter().map(|(group, kinds)| traffic_body(group, kinds)).collect();
    format!(
        "<section><h2>Traffic</h2>\n<div class=\"scroll\"><table><caption>Collectives over the run</caption>\
         <thead><tr><th>Kind</th><th>Calls</th><th>Bytes sent</th><th>Bytes a call</th></tr></thead>\n{}{groups}\
         </table></div></section>\n",
        traffic_body("all groups", &summary.traffic)
    )
}

fn traffic_body(group: &str, kinds: &BTreeMap<String, CollectiveTraffic>) -> String {
    let rows: String = kinds.iter().map(|(kind, traffic)| traffic_row(kind, traffic)).collect();
    format!("<tbody><tr class=\"group\"><th colspan=\"4\">{}</th></tr>{rows}</tbody>\n", escape(group))
}

fn traffic_row(kind: &str, traffic: &CollectiveTraffic) -> String {
    let mean = traffic.bytes.checked_div(traffic.calls).unwrap_or(0);
    format!(
        "<tr><th>{}</th><td>{}</td><td>{}</td><td>{}</td></tr>",
        escape(kind),
        grouped(traffic.calls),
        bytes(traffic.bytes),
        bytes(mean)
    )
}
