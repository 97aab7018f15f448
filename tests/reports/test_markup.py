"""Whatever text is put into an element comes out of the browser as that text."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from training_reports.markup import Markup, details, element, table

# Browsers turn a carriage return into a line feed and a null into a replacement character, escaped or not.
texts = st.text(st.characters(exclude_characters="\r\0", exclude_categories=["Cs"]))


class Parsed(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text = [], {}, ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= dict(attributes)

    def handle_data(self, data):
        self.text += data


@given(text=texts, label=texts.filter(bool))
def test_text_and_attributes_are_read_back_as_they_were_written(text, label):
    parsed = Parsed(element("p", text, class_="note", aria_label=label))
    assert (parsed.tags, parsed.text, parsed.attributes) == (["p"], text, {"class": "note", "aria-label": label})


@given(texts.filter(bool))
def test_tables_and_details_hold_text_only(text):
    parsed = Parsed(details(text, table((text, text), [(text, text)], emphasised=[text]), note=text))
    assert " ".join(parsed.tags) == "details summary small div table thead tr th th tbody tr th td"
    assert parsed.text == f"{text} {text * 5}"


def test_markup_is_not_escaped_again():
    assert element("p", Markup("<b>a &amp; b</b>"), " & c") == "<p><b>a &amp; b</b> &amp; c</p>"
